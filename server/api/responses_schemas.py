"""What clients may send to /v1/responses. Unknown keys are accepted; what is known and not served is refused by name.

The sampling fields that vLLM adds to its own /v1/responses (top_k, seed, stop, ...) are chat's.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.schemas import MAX_LOGPROBS, MAX_TOOLS, SamplingFields
from server.errors import bad_request

LOGPROBS = "message.output_text.logprobs"  # in `include`
MAX_METADATA = 16  # as OpenAI's
_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_METADATA = {"anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]}

_UNSERVED = {
    "conversation": "send the history as input, or use previous_response_id",
    "prompt": "this server stores no prompt templates; send the text as input",
    "echo": "an answer is told without what came before it",
}


class Reasoning(BaseModel):
    """reasoning. `summary` is accepted and moot: the reasoning itself is delivered."""

    model_config = ConfigDict(extra="allow")

    effort: str | None = None


class TextConfig(BaseModel):
    """text."""

    model_config = ConfigDict(extra="allow")

    format: dict[str, Any] | None = None


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    # text or a list of items; checked in responses_input
    input: Annotated[Any, WithJsonSchema(_INPUT)] = None
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    metadata: Annotated[Any, WithJsonSchema(_METADATA)] = None  # checked below
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Any = None  # a word or an object; checked in responses_chat
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = Field(None, fail_fast=True)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text comes with log-probabilities."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


def check_metadata(metadata: Any) -> None:
    """Check what is echoed only; a hundred thousand wrong values are one error.

    Raises:
        ApiError: 400.
    """
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata must be an object of up to {MAX_METADATA} strings.", "metadata")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise bad_request(f"metadata.{name} must be a string.", f"metadata.{name}")


def refuse_unserved_responses(body: ResponsesRequest) -> None:
    """Refuse what would be silently ignored, and what cannot be echoed.

    Raises:
        ApiError: 400, naming the field.
    """
    check_metadata(body.metadata)
    if body.background and body.store is False:
        raise bad_request("background can only be used when `store` is true: leave store out.", "background")
    extra = body.model_extra or {}
    for name, instead in _UNSERVED.items():
        if extra.get(name):
            raise bad_request(f"{name!r} is not supported by this server: {instead}.", name)
    for name in ("prompt_logprobs", "return_token_ids"):
        wish = getattr(body, name)
        if wish is not None and wish is not False:
            raise bad_request(f"{name!r} is told by /v1/chat/completions only.", name)
    if (body.n or 1) != 1:
        raise bad_request("n must be 1: a response has one answer.", "n")
