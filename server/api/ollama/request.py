"""Translate Ollama's requests into the equivalent chat or completion request.

Fields and options are those of https://docs.ollama.com/api. Unsupported options that would change the answer are refused by
name, and so are unknown ones (Ollama only logs a warning). Options about how an Ollama runner uses its machine are ignored.
Values are checked like those of chats, and `OWN_NAMES` has Ollama's names for errors.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.images import FIELD
from server.api.media import refuse_other_fields
from server.api.parsers.registry import NONE
from server.api.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    CompletionRequest,
    refuse_foreign,
    refuse_named,
)
from server.api.served import ServedModel
from server.front.errors import bad_request
from server.http.routes import validated

LATEST = ":latest"  # Ollama's default tag
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
_OPTIONS = {  # -> field of a chat request
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    **{name: name for name in _SAME},
}
_FIXED = {  # options that are accepted only with the value that has no effect
    "typical_p": 1,
    "tfs_z": 1,
    "mirostat": 0,
    "repeat_last_n": -1,  # penalties apply to the whole context
    "penalize_newline": True,
}
_IGNORED = (
    *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv"),
    *("use_mmap", "use_mlock", "vocab_only", "logits_all", "embedding_only", "rope_frequency_base"),
    *("rope_frequency_scale", "mirostat_tau", "mirostat_eta"),
)
_MOST_TOKENS = 2**31 - 1  # reduced to the space in the context
_UNBOUNDED = (-1, -2)  # values of num_predict: generate to the end of the context
_DRAWN_SEED = -1
_LEVELS = ("low", "medium", "high", "max")
_UNSERVED = {
    "images": "send images in a message",  # /api/generate declares the field
    "suffix": "this server does not insert text before a suffix; leave it out",
    "template": "this server uses the checkpoint's chat template; leave it out, or send the whole prompt with raw=true",
    "context": "send conversations as messages to /api/chat; leave it out",
    "logprobs": "use /v1/chat/completions or /v1/completions for log-probabilities; leave it out",
    "top_logprobs": "use /v1/chat/completions or /v1/completions for log-probabilities; leave it out",
}
OWN_NAMES = {  # a field of the chat, or its beginning -> the name in errors
    r"response_format\b.*": "format",
    r"reasoning_effort$": "think",
    **{rf"{ours}(?=\.|$)": f"options.{theirs}" for theirs, ours in _OPTIONS.items()},
}
# In /api/generate, where the only message is the prompt.
OWN_PROMPT_NAMES = {r"messages\b.*": "prompt", **OWN_NAMES}
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
    """Fields of both endpoints. Unknown keys are ignored, as in Ollama, except other APIs' keys for a structure or a stop."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str = Field(min_length=1)
    stream: bool | None = None  # None means true
    format: _Format = None
    options: dict[str, Any] | None = None
    think: _Think = None
    keep_alive: _KeepAlive = None

    @property
    def wants_unloading(self) -> bool:
        """Whether the client requests to unload the model afterwards."""
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
    images: Any = None  # a list of base64 texts; checked in `_with_images`


def served_name(name: str, model: ServedModel) -> str:
    """Return the served name for a client's name, which may have Ollama's default tag.

    Raises:
        ApiError: 404 if the model is not served here.
    """
    return model.check_name(name if name in model.names else name.removesuffix(LATEST))


def chat_request(body: OllamaChat, model: ServedModel) -> ChatRequest:
    """Return the equivalent chat request.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    messages = [_message(place, message, model) for place, message in enumerate(body.messages or ())]
    fields = {"messages": messages, "tools": body.tools or None} | _shared_fields(body, model)
    return validated(ChatRequest.model_validate, fields | _thinking(body, model))


def prompt_request(body: OllamaPrompt, model: ServedModel) -> ChatRequest:
    """Return a chat request with one message, or two with `system`.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    content = _with_images(body.prompt or "", body.images, "images", model)
    messages.append({"role": "user", "content": content})
    fields = {"messages": messages} | _shared_fields(body, model)
    return validated(ChatRequest.model_validate, fields | _thinking(body, model))


def raw_request(body: OllamaPrompt, model: ServedModel) -> CompletionRequest:
    """Return the completion request of a prompt without a chat template.

    Raises:
        ApiError: 400 or 404, naming the field.
    """
    for name, value in (("system", body.system), ("think", body.think), ("images", body.images)):
        if value:
            raise bad_request(f"{name} needs the chat template, but raw=true disables it.", name)
    fields = {"prompt": body.prompt} | _shared_fields(body, model)
    if fields.get("max_tokens") is None:  # a completion's own default would be a few tokens
        fields["max_tokens"] = model.sampling_defaults.get("max_new_tokens", _MOST_TOKENS)
    return validated(CompletionRequest.model_validate, fields)


def check_fields(body: _Body) -> None:
    """Refuse fields that would be silently ignored. Call it outside `named_by`: its errors have Ollama's names already.

    Raises:
        ApiError: 400, naming the field.
    """
    refuse_other_fields(body.model_extra)
    refuse_named(body.model_extra or {}, _UNSERVED)
    refuse_foreign(body.model_extra, form="format", stop="options.stop")


def _shared_fields(body: _Body, model: ServedModel) -> dict[str, Any]:
    return {
        "model": served_name(body.model, model),
        "stream": body.stream is not False,
        "response_format": _response_format(body.format),
        **_sampling(body.options or {}),
    }


def _message(place: int, message: dict[str, Any], model: ServedModel) -> dict[str, Any]:
    """Return a message in chat's form: images are parts, and reasoning and a tool's name have other keys."""
    refuse_other_fields(message, f"messages.{place}.")
    fields = {name: value for name, value in message.items() if name not in ("images", "thinking")}
    if message.get("images"):
        where = f"messages.{place}.images"
        fields["content"] = _with_images(message.get("content"), message["images"], where, model)
    if message.get("thinking"):
        fields["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        fields.setdefault("name", message["tool_name"])
    return fields


def _with_images(content: Any, images: Any, where: str, model: ServedModel) -> Any:
    """Return content with images before it, as in Ollama. Without images, content stays as it is.

    Raises:
        ApiError: 400 if images are not a list of texts, or the model takes none.
    """
    if not images:
        return content
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise bad_request(f"{where} must be a list of base64 texts.", where)
    if model.images is None:
        raise bad_request(f"{where}: this model supports only text, because {model.why_no_images}.", where)
    parts: list[Any] = [
        {"type": "image", "image": f"data:;base64,{image}", FIELD: f"{where}.{number}"}
        for number, image in enumerate(images)
    ]
    if isinstance(content, list):
        return [*parts, *content]
    return [*parts, {"type": "text", "text": content}] if content else parts


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat fields for options.

    Raises:
        ApiError: 400 if an option is unknown or not supported.
    """
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OPTIONS:
            fields[_OPTIONS[name]] = value
        elif name in _FIXED:
            if value is not None and value != _FIXED[name]:
                raise bad_request(
                    f"options.{name} is {value!r}; this server supports only {_FIXED[name]!r}: leave it out.",
                    f"options.{name}",
                )
        elif name not in _IGNORED:
            known = ", ".join(sorted(_OPTIONS))
            raise bad_request(
                f"options.{name} is unknown; this server supports {known}, and ignores options about Ollama's runner.",
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
    raise bad_request("format must be 'json' or a JSON schema (an object).", "format")


def _thinking(body: _Body, model: ServedModel) -> dict[str, Any]:
    """Return the template variables for thinking.

    Raises:
        ApiError: 400 if the value is invalid or the model does not think.
    """
    think = body.think
    if think is None or think == "":
        return {}
    if not isinstance(think, bool) and think not in _LEVELS:
        raise bad_request(f"think must be true, false or one of {', '.join(_LEVELS)}.", "think")
    if think is not False and model.markup.reasoning == NONE:
        raise bad_request(f"think is set, but {body.model!r} does not think; leave it out.", "think")
    on = think is not False
    kwargs = {"enable_thinking": on, "thinking": on}  # Qwen's and GLM's name, DeepSeek's name
    effort = {} if isinstance(think, bool) else {"reasoning_effort": think}
    return {"chat_template_kwargs": kwargs} | effort
