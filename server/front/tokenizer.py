"""The checkpoint's tokenizer and chat template, as `transformers` reads them.

transformers' AutoTokenizer handles each family's quirks (classes that rebuild tokenizer.json, added first tokens,
templates in four places), so correctness comes from it. If there is a `tokenizers` object underneath, the hot paths use
it: decoding takes 2.5 us instead of 8 us (measured), encoding 13 us instead of 44. The front hides torch
before it imports this (see `front_main`); transformers then costs 65 MB and 1.3 s instead of 245 MB and 5 s. Rejected:
the `tokenizers` package alone, which is lighter still (16 MB) but encodes some families' prompts differently.

Templates do not declare what they accept. The content that a role may have is probed (`template_probe`). If that fails, a
template that loops over a message's content and never tests for a string gets a list of parts, and any other gets text. A
template that never mentions `tools` would drop them silently. The same holds for the role `developer` (vLLM's rule: a
template that does not name it does not support it).
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
from tokenizers.decoders import ByteLevel

from scheduler.structure.compiler import Vocabulary
from server.front.detokenizer import LoneTexts
from server.front.published import kimi_tools
from server.front.published.kimi_tokenizer import byte_level_alphabet, is_kimi, is_long, parts_of
from server.front.published.tokenizer_files import load_tokenizer
from server.front.template_probe import ContentForm, content_forms, shows_instructions

DEEPSEEK_V32 = "deepseek_v32"  # the model's type, and the tokenizer mode for it
_DEEPSEEK_V32_TEMPLATE = Path(__file__).parent / "published" / "deepseek_v32.jinja"
_CALLS = "tool_calls"
_DEVELOPER = re.compile(r"""(["'])developer\1""")
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # transformers' own tag, removed before parsing


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """Facts about one model's template. The defaults describe a missing template."""

    text: str = ""
    wants_parts: bool = False
    knows_tools: bool = False
    knows_calls: bool = False  # in earlier messages
    knows_developer: bool = False  # the role; if False, its messages are system messages
    # Form of the content by role, for roles that could be probed.
    forms: Mapping[str, ContentForm] = field(default_factory=dict)
    takes_two_systems: bool = True  # two system messages at the head
    takes_late_systems: bool = True  # system messages between the turns

    def form_of(self, role: str) -> ContentForm:
        """Return the form of content for a role's messages."""
        form = self.forms.get("system" if role == "developer" else role)
        return form or (ContentForm.PARTS if self.wants_parts else ContentForm.TEXT)


def facts_of(template: str | Mapping[str, str] | None) -> TemplateFacts:
    """Return the facts about a template, or about several by name (transformers' "default" and "tool_use")."""
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
    except jinja2.TemplateSyntaxError:  # it uses an extension that only the renderer has
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
    """Return a template's syntax tree.

    Raises:
        jinja2.TemplateSyntaxError: It is not a valid template.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    return environment.parse(_GENERATION.sub("", template))


def _wants_parts(tree: nodes.Template) -> bool:
    """Return whether the template loops over content and never tests whether it is a string."""
    values: dict[str, list[bool]] = {}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            name = assign.target.name
            values.setdefault(name, []).append(_is_content(assign.node, {name}))
    # A name that holds content in one place and something else, such as calls, in another is ambiguous.
    names = {"content"} | {name for name, are_content in values.items() if all(are_content)}
    asks = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return not asks and any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    """Return whether an expression is a message's content, or a name for it."""
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
    """The directory has no usable tokenizer. The message has the file and the reason."""


class ChatTemplateError(ValueError):
    """The chat template is missing or refused these messages. The message is for the client."""


class Tokenizer:
    """Converts text to token ids and back, for one model."""

    def __init__(self, directory: str, chat_template: str | None = None, mode: str = "auto") -> None:
        """Load from a model's directory.

        Args:
            chat_template: File with a chat template, or None for the model's own.
            mode: "deepseek_v32" is that model's chat encoding, which is published as code. "auto" selects it by the
                model's type if there is no template.

        Raises:
            TokenizerError: It is missing or does not load.
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
        # Of the model: a tokenizer may have fewer tokens, or more, which no request can contain.
        self.vocab_size: int = vocab_size or len(self._hf)
        self.num_spelled: int = max(self.vocab_size, len(self._hf))
        self.eos_ids = self._find_eos_ids(Path(directory), config | text_config)
        self.longest_token_chars: int = max(map(len, self._hf.get_vocab()), default=1)
        self.model_max_len: int | None = (config | text_config).get("max_position_embeddings")
        self._not_for_clients = frozenset(inspect.signature(self._hf.apply_chat_template).parameters)
        self._byte_of = (
            {char: byte for byte, char in byte_level_alphabet().items()} if self._is_byte_level() else None
        )
        joins_bytes = self._fast is not None and isinstance(self._fast.decoder, ByteLevel)
        self._lone_texts = {
            skips: LoneTexts(self, skip_special_tokens=skips) for skips in (False, True) if joins_bytes
        }
        self.template = self._template_facts()
        self.special_ids = self._find_special_ids()

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a template for `render_chat`."""
        return bool(self._hf.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize a text. Releases the GIL meanwhile."""
        if self._is_kimi and is_long(text):
            return self._encode_in_parts(text)
        if self._fast is not None:
            ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        return list(self._hf.encode(text, add_special_tokens=add_special_tokens))

    def _encode_in_parts(self, text: str) -> list[int]:
        """Encode the text between special tokens in the same parts as Kimi's published tokenizer."""
        known = sorted(
            (token.content for token in self._hf.added_tokens_decoder.values()), key=len, reverse=True
        )
        pieces = re.split(f"({'|'.join(map(re.escape, known))})", text)  # every second one is special
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
        """Return the text of a token sequence. Invalid UTF-8 becomes U+FFFD."""
        if self._fast is not None:
            text: str = self._fast.decode(token_ids, skip_special_tokens=skip_special_tokens)
            return text
        return str(self._hf.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def lone_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None] | None:
        """Return the texts of tokens that do not depend on their neighbours, or None unless the decoder only joins bytes."""
        return self._lone_texts.get(skip_special_tokens)

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
        """Return the prompt's text. Encode it without special tokens, because the template has written them.

        Raises:
            ChatTemplateError: There is no template, or it refused these messages.
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
            # A template is a program that runs on the client's messages, so any failure is due to them.
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        token = str(self._hf.convert_ids_to_tokens(token_id) or "")
        if self._byte_of is not None and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode(errors="replace")  # SentencePiece's space

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the tokens as the vocabulary spells them, such as "Ġthe", or "" for unknown ids."""
        return [str(token or "") for token in self._hf.convert_ids_to_tokens(list(token_ids))]

    def vocabulary(self) -> Vocabulary:
        """Return all tokens as bytes. Takes a tenth of a second or more."""
        num_known = min(len(self._hf), self.vocab_size)
        unused = (b"",) * (self.vocab_size - num_known)
        return Vocabulary(
            tokens=(*map(self.token_bytes, range(num_known)), *unused),
            special_ids=self._of_model({*self._hf.all_special_ids, *self.special_ids.values()}),
            end_ids=self.eos_ids,
        )

    def configuration(self) -> dict[str, Any]:
        """Return tokenizer_config.json with the values in effect, as JSON."""
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
        """Return whether tokens are spelled in GPT-2's alphabet of printable bytes."""
        return self._fast is not None and "ByteLevel" in repr(self._fast.decoder)

    def _find_special_ids(self) -> dict[str, int]:
        """Return the tokens that decoding omits with skip_special_tokens."""
        if self._fast is None:
            return dict(zip(self._hf.all_special_tokens, self._hf.all_special_ids, strict=True))
        added = self._fast.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def _find_eos_ids(self, directory: Path, config: dict[str, Any]) -> frozenset[int]:
        """Return the ids that end an answer: of generation_config.json or else config.json, and of the tokenizer."""
        declared = _read_json(directory / "generation_config.json").get(
            "eos_token_id", config.get("eos_token_id")
        )
        ids = declared if isinstance(declared, list) else [declared]
        return self._of_model(int(each) for each in [*ids, self._hf.eos_token_id] if each is not None)

    def _of_model(self, token_ids: Iterable[int]) -> frozenset[int]:
        return frozenset(each for each in token_ids if each < self.vocab_size)


def _as_json(value: Any) -> Any:
    """Return a tokenizer's setting as JSON, or None if it has no JSON form."""
    if isinstance(value, AddedToken):
        return value.content
    if isinstance(value, dict):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value if isinstance(value, str | int | float | bool) else None


def _template_in(path: str) -> str:
    """Read a template and check its syntax. Errors in rendering appear only with messages.

    Raises:
        TokenizerError: It cannot be read, or is not valid Jinja.
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
