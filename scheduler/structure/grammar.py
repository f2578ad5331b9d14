"""From a form to a grammar that can be followed token by token, within limits.

The work is llguidance's (MIT licence; Rust): an Earley parser over a lexer of derivative automata, which are built
while they are walked, so that a form compiles in about a millisecond and the cost of a token stays bounded by the
limits below, whatever the form. Rejected: xgrammar (Apache-2.0; C++), whose figures beside ours are in docs/LOG.md.
It needs torch, which the front must not load.

A form may not look behind or ahead in regexes (neither library can). What llguidance does not know of JSON Schema
(`not`, `if`, `uniqueItems`, `format`s of its own invention) is an error and never silently dropped."""

import json
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Series
from functools import partial
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from scheduler.policy.request import Request, Structure
from scheduler.policy.sequence import Row
from scheduler.structure.compiler import StructureError, Vocabulary
from scheduler.structure.schema import enforceable

# Room between the parts of JSON, as much as indented text needs: a few blanks, or one or two line ends and an indentation.
# Without a bound a weak model writes blanks until max_tokens. llama.cpp's grammars allow one blank, or two line ends and 20 blanks.
WHITESPACE = r"([\x20\x09]{1,4}|(\x0D?\x0A){1,2}[\x20\x09]{0,64})"

LIMITS = LLParserLimits(
    max_items_in_row=2_000,  # an object of 500 optional properties
    initial_lexer_fuel=1_000_000,  # 50,000 a millisecond, says llguidance
    step_lexer_fuel=100_000,  # 14,000 a millisecond
    step_max_items=25_000,  # 20,000 a millisecond
    max_lexer_states=20_000,  # 1 to 2 KB each, of all copies of a form together
    max_grammar_size=200_000,
    verbose_errors=False,  # the client's schema stays out of messages
)

MAX_MESSAGE = 500  # characters

_BODY = "structure"

_ONE_OF = (
    "a value may fit two branches of a oneOf: let them differ by type, by const or enum, or by a required property with "
    "different constants, or use anyOf"
)

_OPTIONS = (
    '{"no_forcing": true}'  # else only one spelling is allowed where a text has no choice but its spelling
)


def open_tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    """Build llguidance's token tree; takes a tenth of a second.

    One token is added behind the vocabulary and stands for the end, because a model has any number of such tokens.
    """
    return LLTokenizer(TokenizerWrapper(_Tokens(vocabulary)))


def compile_structure(structure: Structure, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a form; releases the interpreter's lock while it works.

    Raises:
        StructureError: it is no valid form, or beyond the limits.
    """
    matcher = LLMatcher(tokenizer, grammar_of(structure), log_level=0, limits=LIMITS)
    error = error_of(matcher)
    if error:
        raise StructureError(error)
    return matcher


def error_of(matcher: LLMatcher) -> str | None:
    """What went wrong in a matcher, None if nothing did; llguidance's methods do not raise."""
    error = matcher.get_error().replace("<non-verbose/>", "").strip()
    if error == "NoExtensionBias":
        return "no token of this model can go on with the structure"
    if error.startswith("oneOf constraints are not supported"):
        return _ONE_OF
    return _in_one_line(error) if error else None


def grammar_of(structure: Structure) -> str:
    """Return llguidance's own description of a form.

    Raises:
        StructureError: the text is not even JSON, where it must be, or no grammar in any known notation.
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
            raise StructureError("there is nothing to choose from")
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(choices)}\n"}
    if structure.kind in ("grammar", "tool_calls"):
        return {"lark_grammar": any_to_lark(text)}
    raise StructureError(f"{structure.kind!r} is no kind of structure")


def _json_grammar(schema: Any) -> dict[str, Any]:
    """A schema's grammar; what the schema itself says about blanks goes before our bound."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise StructureError("a schema is an object, or true")
    said = schema.get("x-guidance")
    if not isinstance(said, dict | None):
        raise StructureError("x-guidance must be an object")
    options = {} if said is None else said
    if options.get("whitespace_pattern") is None and options.get("whitespace_flexible", True):
        options = {**options, "whitespace_pattern": WHITESPACE}
    return {"json_schema": {**enforceable(schema), "x-guidance": options}}


def _without_anchors(regex: str) -> str:
    """Drop ^ and $ at the ends: a regex is for the whole answer anyway, and llguidance knows no anchors."""
    start = regex.removeprefix("^")
    backslashes = len(start[:-1]) - len(start[:-1].rstrip("\\"))
    return start[:-1] if start.endswith("$") and backslashes % 2 == 0 else start


def _in_one_line(message: str) -> str:
    """What a parser says over several lines, without the carets that point into the line above."""
    lines = [line.strip() for line in message.splitlines() if line.strip(" ^\t")]
    return " ".join(lines)[:MAX_MESSAGE] or "unknown error"


class _Tokens:
    """A vocabulary in the shape that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [*vocabulary.tokens, b"<end of the structure>"]
        self.eos_token_id = len(vocabulary.tokens)
        self.bos_token_id = None
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.end_ids, self.eos_token_id})
        self._id_of_byte = {
            token[0]: place for place, token in enumerate(vocabulary.tokens) if len(token) == 1
        }

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokenize byte by byte: llguidance asks when it wants to spell what can only go on in one way."""
        data = text.encode() if isinstance(text, str) else text
        return [self._id_of_byte[byte] for byte in data if byte in self._id_of_byte]


class GrammarMatcher:
    """Follows one request's tokens.

    Copies of a matcher share their lexer, and with it the limits and an error: where one copy has reached a limit, all fail. So
    a request that fails begins anew once, with a lexer that neither other requests nor drafts have used, and drafts no more.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocabulary: Vocabulary,
        *,
        ignore_eos: bool,
        compile_own: Callable[[], LLMatcher] | None = None,
    ) -> None:
        """Take over a copy, made with `open_tokenizer(vocabulary)`.

        Args:
            compile_own: compiles the form again; None: the copy is the only one.
        """
        self._matcher, self._compile_own = matcher, compile_own
        self._followed: list[int] = []
        self._is_own = False  # it has begun anew
        self._end_ids = sorted(vocabulary.end_ids)
        self._end_place = len(vocabulary.tokens)  # of the token that stands for the end
        self._ignore_eos = ignore_eos
        self.has_ended = matcher.is_stopped()
        self.failure: str | None = None
        self._ahead: list[np.ndarray] = []  # what may come behind each of the drafts that were looked at

    def mask(self, logits_V: Row, after: Series[int] = ()) -> None:
        """See `scheduler.policy.sequence.StructureMatcher`."""
        if self.failure:
            return
        if after:
            bits = self._ahead[len(after) - 1]
        else:
            bits = _allowed_bits(self._matcher)
            self.failure = error_of(self._matcher)
            if self.failure and self._begin_anew():
                bits = _allowed_bits(self._matcher)
                self.failure = error_of(self._matcher)
            if self.failure:
                return
        size = max(logits_V.size, self._end_place + 1)
        allowed = np.unpackbits(bits, count=size, bitorder="little").view(np.bool_)
        if allowed[self._end_place]:
            allowed[self._end_ids] = not self._ignore_eos or not allowed[: self._end_place].any()
        np.copyto(logits_V, -np.inf, where=~allowed[: logits_V.size])

    def look_ahead(self, drafts: Series[int]) -> int:
        """See `scheduler.policy.sequence.StructureMatcher`.

        On a copy: what goes wrong behind a draft that will be rejected is no failure of the request's.
        """
        self._ahead = []
        if self.failure or self.has_ended or self._is_own:
            return 0
        ahead = self._matcher.deep_copy()
        for token_id in drafts:
            if token_id in self._end_ids or not ahead.consume_token(token_id) or ahead.is_stopped():
                break
            bits = _allowed_bits(ahead)
            if error_of(ahead):
                break
            self._ahead.append(bits)
        return len(self._ahead)

    def advance(self, token_id: int) -> None:
        """Follow a token that was sampled; one that the form does not allow is a failure."""
        if self.failure:
            return
        if token_id in self._end_ids:
            self.has_ended = True
        elif self._matcher.consume_token(token_id) or (
            self._begin_anew() and self._matcher.consume_token(token_id)
        ):
            self._followed.append(token_id)
            self.has_ended = self._matcher.is_stopped()
        else:
            self.failure = f"the structure cannot go on with token {token_id}: {error_of(self._matcher)}"

    def _begin_anew(self) -> bool:
        """Follow all tokens again with a lexer of its own; False, and nothing, the second time, and where that fails too."""
        if self._compile_own is None or self._is_own:
            return False
        own, self._is_own = self._compile_own(), True
        if not all(own.consume_token(token_id) for token_id in self._followed):
            return False
        self._matcher = own
        return True


def _allowed_bits(matcher: LLMatcher) -> np.ndarray:
    """What may come next: a bit per token, the lowest first."""
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)


MAX_KEPT = 64  # compiled forms


class Forms:
    """One thread's alone."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the token tree."""
        self._vocabulary, self._tokenizer = vocabulary, open_tokenizer(vocabulary)
        self._compiled: OrderedDict[Structure, LLMatcher] = OrderedDict()

    def matcher_for(self, request: Request) -> GrammarMatcher:
        """Return a copy of the request's form that has followed the tokens which an earlier attempt delivered.

        Raises:
            StructureError: it cannot be compiled.
        """
        params = request.params
        assert params.structure is not None, "only requests that ask for a form come here"
        compiled = self._compile(params.structure)
        ignore_eos = not self._vocabulary.end_ids & set(params.stop_token_ids)
        matcher = GrammarMatcher(
            compiled.deep_copy(),
            self._vocabulary,
            ignore_eos=ignore_eos,
            compile_own=partial(compile_structure, params.structure, self._tokenizer),
        )
        for token_id in request.replayed_ids:
            matcher.advance(token_id)
        return matcher

    def _compile(self, structure: Structure) -> LLMatcher:
        if structure not in self._compiled:
            self._compiled[structure] = compile_structure(structure, self._tokenizer)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structure)
        return self._compiled[structure]
