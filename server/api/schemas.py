"""Request bodies as pydantic models. Unknown keys are accepted and ignored, as in vLLM.

Known keys of unsupported features are refused by name (`refuse_unserved`), and so are other APIs' keys for a
structure or a stop condition (`refuse_foreign`): otherwise an answer that ignores them would look like one that obeys. None
always means that the client did not set the field.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.media import refuse_other_fields
from server.front.errors import bad_request

MAX_CHOICES = 128  # for n, and for prompts times n
MAX_MESSAGES = 10_000  # per chat, including their parts
MAX_STOPS = 128
DEFAULT_MAX_TOKENS = 16  # OpenAI's for completions
MAX_LOGPROBS = 20  # unless --max-logprobs is set
ALL = -1  # as a number of log-probabilities: the whole vocabulary
MAX_TOOLS = 1024
MAX_SALT_CHARS = 256
MAX_SCHEMA_VALUES = 100_000  # per schema, and for all tools together
MAX_LOGPROB_IDS = 128  # vLLM's
MAX_BAD_WORDS = 128  # vLLM's
MAX_ALLOWED_IDS = 4096  # vLLM allows 1,024; each choice sends its own list to its rank

UNSET: tuple[Any, ...] = (None, {}, "", [])  # values that clients send for a field they do not use
_FORMS_ELSEWHERE = (  # other APIs' fields for a structure; an endpoint's own are among its declared fields
    *("format", "output_config", "output_format", "response_format", "structured_outputs", "text"),
    *("guided_choice", "guided_grammar", "guided_json", "guided_json_object", "guided_regex"),
    *("ebnf", "grammar", "json_schema", "regex"),
)
_STOPS_ELSEWHERE = ("stop", "stop_regex", "stop_sequences", "stop_token_ids")
_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})
# Fields of other servers that are not supported yet: refused unless the value has no effect.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none", "auto"),
    "use_beam_search": (),
    "length_penalty": (1,),  # for beam search
    "typical_p": (1,),
    "no_repeat_ngram_size": (),
    "repetition_detection": (),
    "watermarking": (),
    "thinking_token_budget": (-1,),
    "stream_interval": (1,),
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": (),
    "routed_experts_prompt_start": (),
    "prompt_embeds": (),
    "return_prompt_text": (),
    "suffix": (),
    "modalities": (["text"],),
    "mm_processor_kwargs": (),
    "media_io_kwargs": (),
    "chat_template": (),
}
ChatMessage = dict[str, Any]  # a message translated from another API, not checked yet
_TEXT, _IDS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
# Checked in code, for better messages than a union's; described here for /openapi.json.
Stops = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, {"type": "null"}]})
]
Prompt = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}, _IDS, {"type": "array", "items": _IDS}]}
    ),
]
Biases = Annotated[
    Any,
    WithJsonSchema(
        {"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}
    ),
]
# Lists are fail_fast: one wrong item is enough, and an error for each of a million items would cost gigabytes.


class StreamOptions(BaseModel):
    """The stream_options object."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM: send usage in every chunk


class SamplingFields(BaseModel):
    """Fields that chat and plain completions share."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Stops = None  # a string or a list of strings; checked in sampling
    stop_regex: Stops = None  # SGLang's: a string or a list of strings; checked in structure
    user: str | None = None
    # vLLM's extensions
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    min_tokens: int | None = Field(None, ge=0)
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)  # lower goes first; checked in sampling
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOPS, fail_fast=True)
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Biases = None  # {"token id": bias}; checked in sampling, which lists every wrong entry
    bad_words: list[str] | None = Field(None, max_length=MAX_BAD_WORDS, fail_fast=True)
    allowed_token_ids: list[int] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_IDS, fail_fast=True
    )
    prompt_logprobs: int | None = Field(None, ge=ALL)  # maximum: --max-logprobs; checked in sampling
    logprob_token_ids: list[int] | None = Field(None, max_length=MAX_LOGPROB_IDS, fail_fast=True)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    truncation_side: Literal["left", "right"] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # structures; checked in structure
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json_object: bool | None = None
    # SGLang's and llama.cpp's names for structures
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None


class OwnFields(NamedTuple):
    """What each API has in its own way: fields that have other names or values elsewhere, and defaults."""

    prompt_field: str  # the name in errors, as for the other `_field`s
    max_tokens: int | None  # None uses the default; 0 scores the prompt and generates one token to hide
    num_logprobs: int | None  # top tokens per generated token; None disables log-probabilities
    logprobs_field: str
    max_tokens_field: str = "max_tokens"
    # None uses the checkpoint's max_new_tokens, or the rest of the context if it has none.
    default_max_tokens: int | None = None
    num_prompt_logprobs: int | None = None  # if more than the request's prompt_logprobs
    shows_prompt_once: bool = False  # the prompt's log-probabilities, instead of with each choice
    images_field: str = "images"


class Message(BaseModel):
    """A chat message. Extra keys are passed to the template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None  # text, or a list of parts; checked in template_messages


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=ALL)  # maximum: --max-logprobs; checked in sampling
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # templates write their own special tokens
    documents: list[Any] | None = Field(None, max_length=MAX_TOOLS)  # for templates that cite sources
    echo: bool | None = None  # vLLM: begin the answer with the last message if it is the assistant's
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = Field(None, max_length=MAX_TOOLS)  # checked in tools, with tool_choice
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # vLLM: false omits reasoning from the answer
    separate_reasoning: bool | None = None  # SGLang: false leaves reasoning in the content
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None

    def own(self) -> OwnFields:
        """Return the fields that APIs have in their own way.

        Raises:
            ApiError: 400 if top_logprobs is set without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs=true.", "top_logprobs")
        return OwnFields(
            prompt_field="messages",
            max_tokens=self.max_completion_tokens or self.max_tokens,
            max_tokens_field="max_completion_tokens" if self.max_completion_tokens else "max_tokens",
            num_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            logprobs_field="top_logprobs",
            shows_prompt_once=True,
        )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    max_tokens: int | None = Field(None, ge=0)  # 0 only with echo
    prompt: Prompt = None  # text, token ids, or a list of either; checked in completions
    logprobs: int | None = Field(None, ge=ALL)  # maximum: --max-logprobs; checked in sampling
    echo: bool | None = None
    add_special_tokens: bool | None = None
    images: Any = None  # parts as in chats, one for each image token of the prompt; checked in completions

    def own(self) -> OwnFields:
        """Return the fields that APIs have in their own way. A prompt that is cut to fit (-1) leaves space for the default."""
        is_cut = self.truncate_prompt_tokens == -1
        return OwnFields(
            prompt_field="prompt",
            max_tokens=DEFAULT_MAX_TOKENS if is_cut and self.max_tokens is None else self.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=self.logprobs,
            logprobs_field="logprobs",
            num_prompt_logprobs=self.logprobs if self.echo else None,
        )


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether a JSON value has more than `depth` levels of lists and objects, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def has_more_values(value: Any, most: int) -> bool:
    """Return whether a JSON value contains more than `most` values. Stops counting there."""
    num_values, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        num_values += len(each) if isinstance(each, dict | list) else 0
        if num_values > most:
            return True
        children = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        waiting += [child for child in children if isinstance(child, dict | list)]
    return False


def check_num_values(value: Any, param: str) -> None:
    """Refuse more values than a schema needs: walking over them and encoding them would block the event loop.

    Raises:
        ApiError: 400, naming `param`.
    """
    if has_more_values(value, MAX_SCHEMA_VALUES):
        raise bad_request(f"{param} has more than {MAX_SCHEMA_VALUES} values.", param)


def json_text(value: Any, param: str, most_depth: int) -> str:
    """Encode a client's JSON.

    Raises:
        ApiError: 400 if it is nested deeper than `most_depth`, has too many values, or contains NaN or Infinity.
    """
    check_num_values(value, param)
    if is_deeper(value, most_depth):
        raise bad_request(f"{param} is nested deeper than {most_depth} levels.", param)
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        raise bad_request(f"{param} contains NaN or Infinity, which are not valid JSON.", param) from None


def shared_fields(body: BaseModel) -> dict[str, Any]:
    """Return the set fields that have the same name and meaning in chats and completions."""
    return body.model_dump(include=set(SamplingFields.model_fields), exclude_unset=True)


def refuse_unserved(body: SamplingFields) -> None:
    """Refuse fields that would be silently ignored.

    Raises:
        ApiError: 400, naming the field.
    """
    extra = body.model_extra or {}
    refuse_foreign(extra, form="response_format", stop="stop")
    refuse_other_fields(extra)
    for name, harmless in _UNSERVED.items():
        value = extra.get(name)
        is_nothing = value is None or (value in _NOTHING and name != "thinking_token_budget")  # 0 forbids it
        if not is_nothing and value not in harmless:
            raise bad_request(f"{name!r} is not supported by this server yet; leave it out.", name)
    best_of = extra.get("best_of")
    if best_of not in (None, body.n or 1):
        raise bad_request(
            f"best_of is {best_of!r}; this server does not generate more choices than it returns: leave it out, "
            "or set n.",
            "best_of",
        )
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise bad_request("stream_options applies only to streams; it needs stream=true.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs is not streamed; it needs stream=false.", "prompt_logprobs")


def refuse_named(fields: Mapping[str, Any], why: Mapping[str, str], where: str = "") -> None:
    """Refuse fields that are set, by name.

    Args:
        why: The reason for each field, and what to do.
        where: Prefix of the names in errors.

    Raises:
        ApiError: 400, naming the field.
    """
    for name, reason in why.items():
        if fields.get(name) not in _NOTHING:
            raise bad_request(f"{where}{name} is not supported: {reason}.", f"{where}{name}")


def string_of(item: Mapping[str, Any], field: str, where: str) -> str:
    """Return a field that must be a string. `where` is the item's name in errors."""
    value = item.get(field)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{field} must be a string.", f"{where}.{field}")
    return value


def refuse_foreign(extra: Mapping[str, Any] | None, *, form: str, stop: str) -> None:
    """Refuse other APIs' fields for features that this endpoint has under another name.

    Args:
        extra: Fields that the endpoint does not declare.
        form: The endpoint's own field for a structure.
        stop: The endpoint's own field for stop conditions.

    Raises:
        ApiError: 400, naming the field.
    """
    for names, own in ((_FORMS_ELSEWHERE, form), (_STOPS_ELSEWHERE, stop)):
        for name in names:
            value = (extra or {}).get(name)
            if isinstance(value, dict) and name in ("output_config", "text"):
                value = value.get("format")  # their other keys set no structure
            is_text = isinstance(value, dict) and value.get("type") == "text"
            if value not in UNSET and value is not False and not is_text:
                raise bad_request(f"{name} is not a field of this endpoint; use {own}.", name)


def check_num_parts(contents: Iterable[Any], param: str) -> None:
    """Refuse a conversation with too many messages and parts: each costs time before it is tokenized.

    Args:
        contents: Content of each message: a text, or a list of parts, which may contain lists of parts.

    Raises:
        ApiError: 400, naming `param`.
    """
    count = 0
    for content in contents:
        count += 1
        if isinstance(content, list) and count + len(content) <= MAX_MESSAGES:
            within = [part.get("content") for part in content if isinstance(part, dict)]
            count += sum(len(each) for each in within if isinstance(each, list))
        count += len(content) if isinstance(content, list) else 0
        if count > MAX_MESSAGES:
            raise bad_request(f"{param} has more than {MAX_MESSAGES} messages and parts.", param)
