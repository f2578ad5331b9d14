"""Ollama's requests, and the chat or the completion that asks for the same.

Fields and options are those of https://docs.ollama.com/api. An option that would change the answer and is not served is
refused by name, and so is one that nobody knows, of which Ollama itself only warns in its log. Options that say how a
runner of Ollama's uses its machine change nothing here. What is checked, and in which words, is the chat's own matter;
`own_name` brings an error's field back to Ollama's.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from server.api.parsers.registry import NONE
from server.api.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    refuse_foreign,
)
from server.api.served import ServedModel
from server.errors import bad_request
from server.http.routes import refusal

_Fields = TypeVar("_Fields", bound=SamplingFields)
LATEST = ":latest"  # Ollama's tag for a name that has none
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS = {  # -> a chat's field
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in _SAME},
}
_FIXED = {  # options whose only value here changes nothing
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "repeat_last_n": -1,  # penalties look at the whole context
    "penalize_newline": True,
}
_IGNORED = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "rope_frequency_base"),
    *("rope_frequency_scale", "mirostat_tau", "mirostat_eta"),
)
_MOST_TOKENS = 2**31 - 1  # cut to what the context has room for
_UNBOUNDED = (-1, -2)  # of num_predict: up to the context's end
_DRAWN_SEED = -1
_LEVELS = ("low", "medium", "high", "max")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
_UNSERVED = {
    "images": "this server takes text only; leave it out",
    "suffix": "text is not filled in between others; leave it out",
    "template": "the checkpoint's own chat template is used; leave it out, or send the whole prompt with raw=true",
    "context": "conversations are sent as messages to /api/chat; leave it out",
    "logprobs": "log-probabilities are served by /v1/chat/completions and /v1/completions; leave it out",
    "top_logprobs": "log-probabilities are served by /v1/chat/completions and /v1/completions; leave it out",
}
_OWN_NAMES = (  # a field of the chat request, or its beginning -> Ollama's
    (re.compile(r"response_format\b.*"), "format"),
    (re.compile(r"max_tokens$"), "options.num_predict"),
    (re.compile(r"repetition_penalty$"), "options.repeat_penalty"),
    (re.compile(rf"({'|'.join(_OPTIONS)})(?=\.|$)"), r"options.\1"),
    (re.compile(r"reasoning_effort$"), "think"),
)
_Format = Annotated[
    Any, WithJsonSchema({"anyOf": [{"enum": ["json", ""]}, {"type": "object"}, {"type": "null"}]})
]
_Think = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": list(_LEVELS)}, {"type": "null"}]})
]
_KeepAlive = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]})
]


class _Body(BaseModel):
    """What both endpoints take. Unknown keys are accepted and ignored, as Ollama does, but for those that bind an answer."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field(min_length=1)
    stream: bool | None = None  # None is true
    format: _Format = None
    options: dict[str, Any] | None = None
    think: _Think = None
    keep_alive: _KeepAlive = None

    @property
    def wants_unloading(self) -> bool:
        """Whether the model is to leave memory afterwards."""
        return self.keep_alive is not None and str(self.keep_alive).rstrip("smh") in ("0", "0.0")


class OllamaChat(_Body):
    """POST /api/chat."""

    messages: list[dict[str, Any]] | None = Field(None, max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Any] | None = Field(None, max_length=MAX_TOOLS)


class OllamaPrompt(_Body):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


def served_name(name: str, model: ServedModel) -> str:
    """Return the served name that a client means, who may add Ollama's usual tag.

    Raises:
        ApiError: 404, the model is not served here.
    """
    return model.check_name(name if name in model.names else name.removesuffix(LATEST))


def chat_request(body: OllamaChat, model: ServedModel) -> ChatRequest:
    """Return the chat request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    messages = [_message(place, message) for place, message in enumerate(body.messages or ())]
    fields = {"messages": messages, "tools": body.tools or None}
    return _validated(ChatRequest, fields | _shared_fields(body, model) | _thinking(body, model))


def prompt_request(body: OllamaPrompt, model: ServedModel) -> ChatRequest:
    """Return a chat of one message, or two with `system`.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    messages = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt or ""})
    return _validated(
        ChatRequest, {"messages": messages} | _shared_fields(body, model) | _thinking(body, model)
    )


def raw_request(body: OllamaPrompt, model: ServedModel) -> CompletionRequest:
    """Return the completion of a prompt that needs no template.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    for name, value in (("system", body.system), ("think", body.think)):
        if value:
            raise bad_request(f"{name} needs the chat template, which raw=true leaves out.", name)
    return _validated(CompletionRequest, {"prompt": body.prompt} | _shared_fields(body, model))


def check_fields(body: _Body) -> None:
    """Refuse fields that would be silently ignored; before `own_name`, for these are in nobody else's words.

    Raises:
        ApiError: 400, naming the field.
    """
    _refuse_unserved(body.model_extra or {}, "")
    refuse_foreign(body.model_extra, form="format", stop="options.stop")


def own_name(param: str) -> str:
    """Return the name under which Ollama has a field of a chat or a completion."""
    for pattern, name in _OWN_NAMES:
        if pattern.match(param):
            return pattern.sub(name, param)
    return param


def own_prompt_name(param: str) -> str:
    """Return likewise what /api/generate has: its one message is its prompt."""
    return "prompt" if param.partition(".")[0] == "messages" else own_name(param)


def _shared_fields(body: _Body, model: ServedModel) -> dict[str, Any]:
    return {
        "model": served_name(body.model, model),
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        **_sampling(body.options or {}),
    }


def _message(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a chat has it: reasoning and a tool's name have other names."""
    _refuse_unserved(message, f"messages.{place}.")
    fields = {name: value for name, value in message.items() if name not in ("images", "thinking")}
    if message.get("thinking"):
        fields["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        fields.setdefault("name", message["tool_name"])
    return fields


def _refuse_unserved(fields: Mapping[str, Any], where: str) -> None:
    for name in ("images",) if where else _UNSERVED:
        if fields.get(name) not in _NOTHING:
            raise bad_request(
                f"{where}{name} is not supported: {_UNSERVED[name]}.",
                f"{where}{name}",
            )


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that options are.

    Raises:
        ApiError: 400, an option that is unknown or not served.
    """
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            fields[_OPTIONS[name]] = value
        elif name in _FIXED:
            if value is not None and value != _FIXED[name]:
                raise bad_request(
                    f"options.{name} is {value!r}; this server takes {_FIXED[name]!r} only: leave it out.",
                    f"options.{name}",
                )
        elif name not in _IGNORED:
            known = ", ".join(sorted(_OPTIONS))
            raise bad_request(
                f"options.{name} is unknown; this server takes {known}, and ignores how a runner uses its machine.",
                f"options.{name}",
            )
    if fields.get("max_tokens") in _UNBOUNDED:
        fields["max_tokens"] = _MOST_TOKENS
    if fields.get("seed") == _DRAWN_SEED:
        del fields["seed"]
    return fields


def _response_format(value: Any) -> dict[str, Any] | None:
    if value in (None, ""):
        return None
    if value == "json":
        return {"type": "json_object"}
    if isinstance(value, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}
    raise bad_request("format must be 'json' or a JSON schema as an object.", "format")


def _thinking(body: _Body, model: ServedModel) -> dict[str, Any]:
    """Return what templates read of thinking.

    Raises:
        ApiError: 400, no way to say it, or the model does not think.
    """
    think = body.think
    if think is None or think == "":
        return {}
    if not isinstance(think, bool) and think not in _LEVELS:
        raise bad_request(f"think must be true, false or one of {', '.join(_LEVELS)}.", "think")
    if think is not False and model.markup.reasoning == NONE:
        raise bad_request(f"think is set, and {body.model!r} does not think; leave it out.", "think")
    on = think is not False
    kwargs = {"enable_thinking": on, "thinking": on}  # Qwen's and GLM's word, DeepSeek's word
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"chat_template_kwargs": kwargs} | effort


def _validated(kind: type[_Fields], fields: dict[str, Any]) -> _Fields:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = error.errors()[0]
        raise refusal(found, found["loc"]) from error
