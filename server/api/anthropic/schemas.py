"""What clients may send to /v1/messages. Unknown keys are accepted and ignored, as Anthropic's newer ones must be."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from server.api.schemas import MAX_STOPS, MAX_TOOLS

_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_Content = Annotated[Any, WithJsonSchema(_BLOCKS)]  # text or a list of blocks; checked in conversation


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class InputMessage(_Body):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]  # system: Claude Code puts reminders between the turns
    content: _Content


class Tool(_Body):
    """A tool that the client runs."""

    name: str = Field(min_length=1)
    type: str | None = None  # absent or "custom"; others run on Anthropic's servers
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(_Body):
    """tool_choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Body):
    """thinking. A budget is accepted and not enforced: open models have no such brake."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputConfig(_Body):
    """output_config."""

    effort: str | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(_Body):
    """POST /v1/messages/count_tokens: what makes up a prompt."""

    model: str | None = None
    messages: list[InputMessage] = Field(min_length=1, fail_fast=True)
    system: _Content = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's extra


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOPS, fail_fast=True)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1)
    metadata: dict[str, Any] | None = None
