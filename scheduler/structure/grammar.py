"""Grammars of structures, which can be followed token by token within limits.

Uses llguidance (MIT licence; Rust): an Earley parser over a lexer of derivative automata that are built lazily. So a
structure compiles in about a millisecond, and the limits below bound the cost of a token for any structure. Rejected:
xgrammar (Apache-2.0; C++), compared in docs/LOG.md, which needs torch; the front must not load torch.

Regexes may not look behind or ahead (neither library supports this). JSON Schema keywords that llguidance does not
support (`not`, `if`, `uniqueItems`, custom `format`s) are an error and never silently dropped."""

import json
import random
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Series
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from scheduler.policy.request import Request, Structure
from scheduler.policy.sequence import Row
from scheduler.structure.compiler import CLIENTS_FAULT, StructureError, Vocabulary
from scheduler.structure.masks import MASK_BUDGET_PER_TOKEN_S, MASK_BUDGET_S, Mask, MaskThreads
from scheduler.structure.schema import enforceable

# Whitespace between the parts of JSON, enough for indented text: a few blanks, or one or two line ends and an indentation.
# Without a bound, a weak model writes blanks until max_tokens. llama.cpp allows one blank, or two line ends and 20 blanks.
WHITESPACE = r"([\x20\x09]{1,4}|(\x0D?\x0A){1,2}[\x20\x09]{0,64})"

LIMITS = LLParserLimits(
    max_items_in_row=2_000,  # an object of 500 optional properties
    initial_lexer_fuel=1_000_000,  # 50,000 per millisecond, according to llguidance
    step_lexer_fuel=100_000,  # 14,000 per millisecond
    # 20,000 per millisecond, but 500 in an ambiguous grammar. An object of 500 optional properties needs 4,000.
    step_max_items=6_000,
    max_lexer_states=20_000,  # 1 to 2 KB each, for all copies of a structure together
    max_grammar_size=200_000,
    verbose_errors=False,  # keeps the client's schema out of messages
)

MAX_MESSAGE = 500  # characters
_TOO_LARGE = re.compile("Too many items|Current row has|too many items")
NUM_REHEARSALS, REHEARSED_TOKENS = 3, 8
QUICK_S = 0.002  # of a mask; structures with slower ones get no drafts
_REMEDY = (
    "Write the grammar so that every text has only one derivation, such as `e: t (op t)*` for `e: e op e`, or `e: t+` for "
    "`e: e e | t`"
)

_BODY = "structure"

_ONE_OF = (
    "a value may match two branches of a oneOf: make them differ by type, by const or enum, or by a required property with "
    "different constants, or use anyOf"
)

# Without this, text that the grammar fixes may be spelled with one sequence of tokens only.
_OPTIONS = '{"no_forcing": true}'


def open_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Build llguidance's token tree. Takes a tenth of a second.

    One token after the vocabulary represents the end, because a model may have several end tokens.
    """
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))


def compile_structure(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a structure. Releases the interpreter's lock meanwhile.

    Raises:
        StructureError: The structure is invalid or exceeds the limits.
    """
    matcher = LLMatcher(tokenizer, grammar_of(structure), log_level=0, limits=LIMITS)
    error = error_of(matcher)
    if error:
        raise StructureError(error)
    return matcher


def rehearse(matcher: LLMatcher) -> str | None:
    """Follow the first tokens of a few random answers. Returns the first error, or None.

    A structure may compile and still exceed a limit at its third token, if hundreds of alternatives begin alike.
    """
    for walk in range(NUM_REHEARSALS):
        draw, copy = random.Random(walk), matcher.deep_copy()
        for _ in range(REHEARSED_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(_allowed_bits(copy), bitorder="little"))
            if (error := error_of(copy)) or not len(allowed):
                return error
            if not copy.consume_token(int(draw.choice(allowed))) or copy.is_stopped():
                break
        if error := error_of(copy):
            return error
    return None


def error_of(matcher: LLMatcher) -> str | None:
    """Return a matcher's error, or None. llguidance's methods do not raise."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if error == "NoExtensionBias":
        return "no token of this model can continue the structure"
    if error.startswith("oneOf constraints are not supported"):
        return _ONE_OF
    if _TOO_LARGE.search(error):
        return f"{CLIENTS_FAULT}large or too ambiguous at this place ({_in_one_line(error)}). {_REMEDY}"
    return _in_one_line(error) if error else None


def grammar_of(structure: Structure) -> str:
    """Return llguidance's description of a structure.

    Raises:
        StructureError: The text is not valid JSON, if it must be, or not a grammar in a known notation.
    """
    try:
        grammar = _grammar_of_kind(structure)
    except (ValueError, GbnfToLarkError) as error:
        raise StructureError(_in_one_line(str(error))) from error
    except RecursionError:
        raise StructureError("it is nested too deeply") from None
    begin = f"%llguidance {_OPTIONS}\nstart: @{_BODY}\n"
    if structure.after:
        begin = f"%llguidance {_OPTIONS}\nstart: before @{_BODY}\n"
        begin += f"before[suffix={json.dumps(structure.after)}]: /(?s:.*)/\n"
    return json.dumps({"grammars": [{"lark_grammar": begin}, {**grammar, "name": _BODY}]})


def _grammar_of_kind(structure: Structure) -> dict[str, Any]:
    text = structure.text
    if structure.kind == "json_schema":
        return _json_grammar(json.loads(text))
    if structure.kind == "json_object":
        return _json_grammar({"type": "object"})
    if structure.kind == "regex":
        grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(_without_anchors(text)))
        return dict(grammar["grammars"][0])
    if structure.kind == "choice":
        choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(text)]
        if not choices:
            raise StructureError("the list of choices is empty; give at least one")
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(choices)}\n"}
    if structure.kind in ("grammar", "tool_calls"):
        return {"lark_grammar": any_to_lark(text)}
    raise StructureError(f"{structure.kind!r} is not a kind of structure")


def _json_grammar(schema: Any) -> dict[str, Any]:
    """Return a schema's grammar. The schema's own whitespace options take precedence over `WHITESPACE`."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise StructureError("a schema must be an object or true")
    said = schema.get("x-guidance")
    if not isinstance(said, dict | None):
        raise StructureError("x-guidance must be an object")
    options = {} if said is None else said
    if options.get("whitespace_pattern") is None and options.get("whitespace_flexible", True):
        options = {**options, "whitespace_pattern": WHITESPACE}
    return {"json_schema": {**enforceable(schema), "x-guidance": options}}


def _without_anchors(regex: str) -> str:
    """Drop ^ and $ at the ends: a regex matches the whole answer anyway, and llguidance has no anchors."""
    start = regex.removeprefix("^")
    backslashes = len(start[:-1]) - len(start[:-1].rstrip("\\"))
    return start[:-1] if start.endswith("$") and backslashes % 2 == 0 else start


def _in_one_line(message: str) -> str:
    """Join the lines of a parser's message, without the carets that point into the line above."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^\t")]
    return " ".join(lines)[:MAX_MESSAGE] or "unknown error"


class _Tokens:
    """A vocabulary in llguidance's form."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.tokens, b"<end of the structure>"]
        self.eos_token_id = len(vocabulary.tokens)
        self.bos_token_id = None
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.end_ids, self.eos_token_id})
        self._id_of_byte = {
            token[0]: place for place, token in enumerate(vocabulary.tokens) if len(token) == 1
        }

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize byte by byte. llguidance uses this to spell text that the grammar fixes."""
        data = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte[byte] for byte in data if byte in self._id_of_byte]


class GrammarMatcher:
    """Follows one request's tokens. Threads compute its masks (`masks`) as soon as the last token is known.

    Copies of a matcher share their lexer with its limits and errors: if one copy reaches a limit, all fail. So a request
    that fails restarts once with a new lexer, which no other request or draft has used, and gets no more drafts.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        ignore_eos: bool,
        compile_own: Callable[[], LLMatcher] | None = None,
        threads: MaskThreads | None = None,
    ) -> None:
        """Take over a matcher that was made with `open_tokenizer(vocabulary)`.

        Args:
            compile_own: Compiles the structure again. None if the matcher has no copies.
            threads: Threads that compute masks. With None, `mask` computes them.
        """
        self._matcher, self._compile_own, self._threads = matcher, compile_own, threads
        self._followed: list[int] = []
        self._is_own = False  # it has restarted with its own lexer
        self._is_behind = False  # its newest token is not followed yet; it restarts with the next mask
        self._end_ids = sorted(vocabulary.end_ids)
        self._end_place = len(vocabulary.tokens)  # index of the token that represents the end
        self._ignore_eos = ignore_eos
        self.has_ended = matcher.is_stopped()
        self.failure: str | None = None
        self.is_late = False
        self._coming: Future[Mask] | None = None  # the next mask; dropped when a token arrives
        self._last_s = self._cpu_s = 0.0  # processor time of the last mask, and of all masks
        self._ahead: list[np.ndarray] = []  # the masks after each draft in `look_ahead`

    @property
    def is_ready(self) -> bool:
        return self._coming is None or self._coming.done()

    def begin_step(self) -> None:
        self.is_late = False
        if self._threads is not None and not self.failure and not self.has_ended:
            self._begin_mask()

    def mask(self, logits_V: Row, after: Series[int] = ()) -> None:
        if self.failure:
            return
        bits = self._ahead[len(after) - 1] if after else self._next_bits()
        if bits is None:
            return
        size = max(logits_V.size, self._end_place + 1)
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if allowed[self._end_place]:
            allowed[self._end_ids] = not self._ignore_eos or not allowed[: self._end_place].any()
        np.copyto(logits_V, -np.inf, where=~allowed[: logits_V.size])

    def _next_bits(self) -> np.ndarray | None:
        """Return the next mask. Returns None if it is not ready in time or after a failure."""
        coming = self._begin_mask()
        # A structure that was slow is not waited for: the request sits out until its mask is ready.
        may_wait = self._threads is not None and self._last_s <= QUICK_S
        if not coming.done() and not (may_wait and self._threads and self._threads.wait(coming)):
            self.is_late = True
            return None
        found = coming.result()
        self._take_cost(found)
        self.failure = self.failure or found.failure or None
        return None if self.failure else found.bits

    def _begin_mask(self) -> "Future[Mask]":
        """Start to compute the next mask, unless it is done or running."""
        if self._coming is None and self._threads is not None:
            self._coming = self._threads.start(self._compute, self._last_s)
        elif self._coming is None:
            self._coming = _done(self._compute())
        return self._coming

    def _take_cost(self, found: Mask) -> None:
        """Charge a mask's processor time to the request. End the request if its budget is spent."""
        if found.cpu_s == 0:
            return
        self._coming = _done(found._replace(cpu_s=0.0))  # charge each mask once
        self._last_s = found.cpu_s
        self._cpu_s += found.cpu_s
        allowed_s = MASK_BUDGET_S + MASK_BUDGET_PER_TOKEN_S * len(self._followed)
        if self._cpu_s > allowed_s:
            self.failure = (
                f"{CLIENTS_FAULT}ambiguous to follow: finding the allowed tokens took {self._cpu_s:.1f} s of processor "
                f"time for {len(self._followed)} tokens; {allowed_s:.1f} s are allowed. {_REMEDY}"
            )

    def _compute(self) -> Mask:
        """Compute the next mask, in a thread. Nothing else may use this matcher meanwhile."""
        begun_s = time.thread_time()
        if self._is_behind and not self._begin_anew():
            return Mask(None, self._cannot_go_on(self._followed[-1]))
        bits = _allowed_bits(self._matcher)
        failure = error_of(self._matcher)
        if failure and self._begin_anew():
            bits = _allowed_bits(self._matcher)
            failure = error_of(self._matcher)
        if not failure and time.thread_time() - begun_s > QUICK_S:
            self._begin_anew()  # otherwise it locks the lexer of all copies, also for the step loop
        return Mask(bits, failure or "", time.thread_time() - begun_s)

    def look_ahead(self, drafts: Series[int]) -> int:
        """Compute the masks after drafts.

        Uses a copy, because an error after a rejected draft is not the request's failure. The step waits for these masks, so
        a structure with slow masks gets no drafts.
        """
        self._ahead = []
        if self.failure or self.has_ended or self._is_own or self._is_behind or self._last_s > QUICK_S:
            return 0
        if self._coming is not None and self._threads is not None and not self._threads.wait(self._coming):
            return 0
        ahead = self._matcher.deep_copy()
        for token_id in drafts:
            if token_id in self._end_ids or not ahead.consume_token(token_id) or ahead.is_stopped():
                break
            begun_s = time.thread_time()
            bits = _allowed_bits(ahead)
            if error_of(ahead):
                break
            self._ahead.append(bits)
            if (seconds := time.thread_time() - begun_s) > QUICK_S:
                self._last_s = seconds
                break
        return len(self._ahead)

    def advance(self, token_id: int) -> None:
        if self.failure:
            return
        assert self.is_ready, "a token is sampled after its mask was computed"
        self._coming = None
        if token_id in self._end_ids:
            self.has_ended = True
            return
        self._followed.append(token_id)
        if self._matcher.consume_token(token_id):
            self.has_ended = self._matcher.is_stopped()
        elif self._compile_own is None or self._is_own:
            self.failure = self._cannot_go_on(token_id)
        else:
            self._is_behind = True

    def _cannot_go_on(self, token_id: int) -> str:
        return f"the structure does not allow token {token_id}: {error_of(self._matcher)}"

    def _begin_anew(self) -> bool:
        """Follow all tokens again with a new lexer. Returns False and keeps the old one if this fails or was tried."""
        if self._compile_own is None or self._is_own:
            return False
        own, self._is_own = self._compile_own(), True
        if not all(own.consume_token(token_id) for token_id in self._followed):
            return False
        self._matcher, self._is_behind = own, False
        return True


def _done(mask: Mask) -> "Future[Mask]":
    future: Future[Mask] = Future()
    future.set_result(mask)
    return future


def _allowed_bits(matcher: LLMatcher) -> np.ndarray:
    """Return the allowed next tokens: a bit per token, lowest first."""
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)


MAX_KEPT = 64  # compiled structures


class Forms:
    """The compiled structures. Several threads may call `matcher_for`. If two need the same new structure, both compile
    it."""

    def __init__(self, vocabulary: Vocabulary, threads: MaskThreads | None = None) -> None:
        """Build the token tree. `threads` compute the masks of matchers; with None, `mask` does."""
        self._threads = threads
        self._vocabulary, self._tokenizer = vocabulary, open_tokenizer(vocabulary)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()

    def matcher_for(self, request: Request) -> GrammarMatcher:
        """Return a matcher for the request's structure, advanced over the tokens that an earlier attempt delivered.

        Raises:
            StructureError: The structure cannot be compiled.
        """
        params = request.params
        assert params.structure is not None, "only requests with a structure need a matcher"
        compiled = self._compile(params.structure)
        ignore_eos = not self._vocabulary.end_ids & set(params.stop_token_ids)
        matcher = GrammarMatcher(
            compiled.deep_copy(),
            self._vocabulary,
            ignore_eos=ignore_eos,
            compile_own=partial(compile_structure, params.structure, self._tokenizer),
            threads=self._threads,
        )
        for token_id in request.replayed_ids:
            matcher.advance(token_id)
        return matcher

    def _compile(self, structure: Structure) -> LLMatcher:
        with self._lock:
            compiled = self._compiled.get(structure)
        if compiled is None:
            compiled = compile_structure(structure, self._tokenizer)
        with self._lock:
            compiled = self._compiled.setdefault(structure, compiled)
            self._compiled.move_to_end(structure)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return compiled
