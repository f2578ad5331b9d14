"""The checkpoint's tokenizer and chat template, as `transformers` reads them, and what the front asks of them.

transformers' AutoTokenizer knows each family's quirks (classes that rebuild tokenizer.json, added first tokens,
templates in four places), so correctness comes from it. The hot paths go to the `tokenizers` object beneath where
there is one: decoding takes 2.5 us there against 8 us (measured), encoding 13 us against 44. The front hides torch
before it imports this (see `front_main`); transformers then costs 65 MB and 1.3 s instead of 245 MB and 5 s. Rejected:
the `tokenizers` package alone, which is lighter still (16 MB) but encodes some families' prompts differently.

Templates do not declare what they take. Which content a role may have is probed (`template_probe`); where that fails, one
that loops over a message's content and never asks whether it is a string wants a list of parts, and every other text. One
that never mentions `tools` would drop them in silence, and so would many with the role `developer` (vLLM's rule: a template
that does not name it does not know it).
"""

import inspect
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from tokenizers import AddedToken

from scheduler.structure.compiler import Vocabulary
from server.front.published import kimi_tools
from server.front.published.kimi_tokenizer import byte_level_alphabet, is_kimi, is_long, parts_of
from server.front.published.tokenizer_files import load_tokenizer
from server.front.template_probe import ContentForm, content_forms, shows_instructions

DEEPSEEK_V32 = "deepseek_v32"  # its type, and its mode of the tokenizer
_DEEPSEEK_V32_TEMPLATE = Path(__file__).parent / "published" / "deepseek_v32.jinja"
_CALLS = "tool_calls"
_DEVELOPER = re.compile(r"""(["'])developer\1""")
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # transformers' own tag; parsed without it


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """About one model's template; the defaults are those of no template."""

    text: str = ""
    wants_parts: bool = False
    knows_tools: bool = False
    knows_calls: bool = False  # of a history's messages
    knows_developer: bool = False  # the role; below, its messages are system messages
    forms: Mapping[str, ContentForm] = field(
        default_factory=dict
    )  # of content, by role, as far as it was probed
    takes_two_systems: bool = True  # messages, at the head
    takes_late_systems: bool = True  # between the turns

    def form_of(self, role: str) -> ContentForm:
        """Return what the content of a role's messages may be."""
        form = self.forms.get("system" if role == "developer" else role)
        return form or (ContentForm.PARTS if self.wants_parts else ContentForm.TEXT)


def facts_of(template: str | Mapping[str, str] | None) -> TemplateFacts:
    """Read a template, or several by name ("default" and "tool_use", as transformers keeps them)."""
    if not template:
        return TemplateFacts()
    if not isinstance(template, str):
        default = facts_of(template.get("default", ""))
        return TemplateFacts(
            text="\n".join(template.values()),
            wants_parts=default.wants_parts,
            knows_tools=default.knows_tools or "tool_use" in template,
            knows_calls=default.knows_calls or "tool_use" in template,
            knows_developer=default.knows_developer,
        )
    knows_calls, knows_developer = _CALLS in template, _DEVELOPER.search(template) is not None
    try:
        tree = parse_template(template)
    except jinja2.TemplateSyntaxError:  # an extension that only the rendering side has
        return TemplateFacts(
            text=template,
            knows_tools="tools" in template,
            knows_calls=knows_calls,
            knows_developer=knows_developer,
        )
    return TemplateFacts(
        text=template,
        wants_parts=_wants_parts(tree),
        knows_tools=any(name.name == "tools" for name in tree.find_all(nodes.Name)),
        knows_calls=knows_calls,
        knows_developer=knows_developer,
    )


def parse_template(template: str) -> nodes.Template:
    """Read a template's syntax tree.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    return environment.parse(_GENERATION.sub("", template))


def _wants_parts(tree: nodes.Template) -> bool:
    """Tell whether content is looped over, and never asked whether it is text."""
    values: dict[str, list[bool]] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            name = assign.target.name
            values.setdefault(name, []).append(_is_content(assign.node, {name}))
    # One that is content here and something else there, such as calls, says nothing.
    names = {"content"} | {name for name, are_content in values.items() if all(are_content)}
    asks = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return not asks and any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    """Tell whether an expression is a message's content, or a name for it."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's byte fallback


_TOKEN_FIELDS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")  # of an added token


class TokenizerError(ValueError):
    """The directory has no usable tokenizer; the message says which and why."""


class ChatTemplateError(ValueError):
    """The chat template refused these messages, or there is none; the message is for the client."""


class Tokenizer:
    """Text to token ids and back, for one model."""

    def __init__(self, directory: str, chat_template: str | None = None, mode: str = "auto") -> None:
        """Load from a model's directory.

        Args:
            chat_template: a file with the template of chats; None is the model's own.
            mode: "deepseek_v32" is that model's encoding of chats, which it publishes as code; "auto" chooses it by
                the model's type if there is no template.

        Raises:
            TokenizerError: there is none, or it does not load.
        """
        config = _read_json(Path(directory) / "config.json")
        text_config = config.get("text_config") or config.get("llm_config") or {}
        vocab_size: int | None = (config | text_config).get("vocab_size")
        try:
            self._hf: Any = load_tokenizer(Path(directory), vocab_size)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            raise TokenizerError(f"cannot load a tokenizer from {directory}: {error}") from error
        if chat_template is not None:
            self._hf.chat_template = _template_in(chat_template)
        elif mode == DEEPSEEK_V32 or (
            config.get("model_type") == DEEPSEEK_V32 and not self._hf.chat_template
        ):
            self._hf.chat_template = _template_in(str(_DEEPSEEK_V32_TEMPLATE))
        self._fast = getattr(self._hf, "backend_tokenizer", None) if self._hf.is_fast else None
        self._is_kimi = is_kimi(self._hf)
        # The model's: a tokenizer may know fewer tokens, or more, which no request can have.
        self.vocab_size: int = vocab_size or len(self._hf)
        self.num_spelled: int = max(self.vocab_size, len(self._hf))
        self.eos_ids = self._find_eos_ids(Path(directory), config | text_config)
        self.longest_token_chars: int = max(map(len, self._hf.get_vocab()), default=1)
        self.model_max_len: int | None = (config | text_config).get("max_position_embeddings")
        self._not_for_clients = frozenset(inspect.signature(self._hf.apply_chat_template).parameters)
        self._byte_of = (
            {char: byte for byte, char in byte_level_alphabet().items()} if self._is_byte_level() else None
        )
        self.template = self._template_facts()
        self.special_ids = self._find_special_ids()

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize. Releases the interpreter's lock while it works."""
        if self._is_kimi and is_long(text):
            return self._encode_in_parts(text)
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def _encode_in_parts(self, text: str) -> list[int]:
        """Encode what stands between special tokens in the parts that Kimi's published tokenizer makes of it."""
        known = sorted(
            (token.content for token in self._hf.added_tokens_decoder.values()), key=len, reverse=True
        )
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)  # every second one is such a token
        parts = [
            part for place, piece in enumerate(pieces) for part in ([piece] if place % 2 else parts_of(piece))
        ]
        assert self._fast is not None, "a tokenizer that is built here is a fast one"
        return [
            each
            for encoded in self._fast.encode_batch(parts, add_special_tokens=False)
            for each in encoded.ids
        ]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of a token sequence; bytes that are no UTF-8 become U+FFFD."""
        if self._fast is not None:
            text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        return str(self._hf.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Any] = (),
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt's text, to be encoded without special tokens: the template wrote them.

        Raises:
            ChatTemplateError: no template, or it refused these messages.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        for name in template_kwargs or {}:
            if name in self._not_for_clients:
                raise ChatTemplateError(f"chat_template_kwargs cannot set {name!r}")
        variables = dict(template_kwargs or {})
        if tools and (self._is_kimi or kimi_tools.VARIABLE in self.template.text):
            tools, prepared = kimi_tools.prepared(tools)
            variables = prepared | variables
        try:
            text: str = self._hf.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                documents=list(documents) or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            # A template is a program over the client's messages: whatever it trips over is in them.
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for, which may be part of a character."""
        token = str(self._hf.convert_ids_to_tokens(token_id) or "")
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode(errors="replace")  # SentencePiece's blank

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them, such as "Ġthe"; empty where it has none."""
        return [str(token or "") for token in self._hf.convert_ids_to_tokens(list(token_ids))]

    def vocabulary(self) -> Vocabulary:
        """Return all tokens as bytes; takes a tenth of a second and more."""
        num_known = min(len(self._hf), self.vocab_size)
        unused = (b"",) * (self.vocab_size - num_known)
        return Vocabulary(
            tokens=(*map(self.token_bytes, range(num_known)), *unused),
            special_ids=self._of_model({*self._hf.all_special_ids, *self.special_ids.values()}),
            end_ids=self.eos_ids,
        )

    def configuration(self) -> dict[str, Any]:
        """Return what tokenizer_config.json says and what became of it, as JSON."""
        tokens = self._hf.added_tokens_decoder
        said = {name: _as_json(value) for name, value in self._hf.init_kwargs.items()}
        return {name: value for name, value in said.items() if value is not None} | {
            "tokenizer_class": type(self._hf).__name__,
            "model_max_length": self.model_max_len or int(self._hf.model_max_length),
            "added_tokens_decoder": {
                str(token_id): {name: getattr(token, name) for name in _TOKEN_FIELDS}
                for token_id, token in tokens.items()
            },
            "chat_template": self._hf.chat_template,
        }

    def _template_facts(self) -> TemplateFacts:
        facts, render = facts_of(self._hf.chat_template), self._render_probe
        if not facts.text:
            return facts
        facts = replace(facts, forms=content_forms(render))
        shows = partial(shows_instructions, render, facts.form_of("system"))
        knows = facts.knows_developer and shows("developer") is not False
        roles = ("system", "developer") if knows else ("system",)
        return replace(
            facts,
            knows_developer=knows,
            takes_two_systems=all(shows("system", role) is not False for role in roles),
            takes_late_systems=all(
                shows(*before, role, is_late=True) is not False
                for role in roles
                for before in ((), ("system",))
            ),
        )

    def _render_probe(self, messages: list[dict[str, Any]]) -> str | None:
        try:
            return self.render_chat(messages)
        except ChatTemplateError:
            return None

    def _is_byte_level(self) -> bool:
        """Tell whether tokens are spelled in GPT-2's alphabet of printable bytes."""
        return self._fast is not None and "ByteLevel" in repr(self._fast.decoder)

    def _find_special_ids(self) -> dict[str, int]:
        """Return the tokens that decoding leaves out where special tokens are skipped."""
        if self._fast is None:
            return dict(zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True))
        added = self._fast.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def _find_eos_ids(self, directory: Path, config: dict[str, Any]) -> frozenset[int]:
        """Collect the ids that end an answer: generation_config.json's, else config.json's, and the tokenizer's."""
        declared = _read_json(directory / "generation_config.json").get(
            "eos_token_id", config.get("eos_token_id")
        )
        ids = declared if isinstance(declared, list) else [declared]
        return self._of_model(int(each) for each in [*ids, self._hf.eos_token_id] if each is not None)

    def _of_model(self, token_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(each for each in token_ids if each < self.vocab_size)


def _as_json(value: Any) -> Any:
    """Return a tokenizer's setting as JSON, None where it has no such form."""
    if isinstance(value, AddedToken):
        return value.content
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value if isinstance(value, str | int | float | bool) else None


def _template_in(path: str) -> str:
    """Read a template and see that it is one; what it makes of messages is seen when they come.

    Raises:
        TokenizerError: it cannot be read, or is no Jinja.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        parse_template(text)
    except (OSError, UnicodeDecodeError, jinja2.TemplateSyntaxError) as error:
        raise TokenizerError(f"--chat-template {path} cannot be used: {error}") from error
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """Read an optional JSON object."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}
