"""Sampling parameters and results of `LLM` in vLLM's form, on top of the endpoint's JSON.

Field names are those of vLLM's `SamplingParams`, `RequestOutput`, `CompletionOutput` and `Logprob`, so that scripts for
its LLM class work. The service checks the values; its error message names the field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_ALL = -1
_TOKEN_ID = "token_id:"  # prefix of token names in answers with token ids


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters for choosing tokens. None means the default of the checkpoint's generation_config.json or of the service."""

    n: int = 1
    max_tokens: int | None = 16  # vLLM's default; None is up to the end of the context
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logprobs: int | None = None  # number of likeliest tokens per position, in addition to the chosen one
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Mapping[str, Any] | None = None  # such as {"json": SCHEMA} or {"regex": ...}

    def body(self) -> dict[str, Any]:
        """Return the fields of the request's body."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in said.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """A token's natural-log probability at a position."""

    logprob: float
    rank: int | None  # 1 is the likeliest; None is outside the requested number
    decoded_token: str | None = None  # if the service returned it


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of the chosen tokens; None without logprobs
    logprobs: list[dict[int, Logprob]] | None  # per token: the chosen one and the likeliest, by id
    finish_reason: str
    stop_reason: str | int | None  # the stop string or token that ended it


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """The result of one prompt."""

    request_id: str
    prompt: str | None  # None if token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # as CompletionOutput's; the first is None
    outputs: list[CompletionOutput]
    num_cached_tokens: int  # prompt tokens that came from the prefix cache
    finished: bool = True


def output_from(body: Mapping[str, Any], prompt: str | None, params: SamplingParams) -> RequestOutput:
    """Convert an answer of /v1/completions with token ids."""
    choices = body["choices"]
    return RequestOutput(
        request_id=body["id"],
        prompt=prompt,
        prompt_token_ids=choices[0]["prompt_token_ids"],
        prompt_logprobs=_prompt_logprobs(choices[0].get("prompt_logprobs")),
        outputs=[_choice(index, choice, params) for index, choice in enumerate(choices)],
        num_cached_tokens=(body["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0),
    )


def _choice(index: int, choice: Mapping[str, Any], params: SamplingParams) -> CompletionOutput:
    told = choice.get("logprobs")
    return CompletionOutput(
        index=index,
        text=choice["text"],
        token_ids=choice["token_ids"],
        cumulative_logprob=sum(told["token_logprobs"]) if told else None,
        logprobs=[_ranked(top, params.logprobs or 0) for top in told["top_logprobs"]] if told else None,
        finish_reason=choice["finish_reason"],
        stop_reason=choice.get("stop_reason"),
    )


def _ranked(top: Mapping[str, float], num_top: int) -> dict[int, Logprob]:
    """Convert one position: the `num_top` likeliest tokens (_ALL means all), and the chosen one if it is not among them."""
    likeliest_first = sorted(top.items(), key=lambda item: -item[1])
    return {
        int(name.removeprefix(_TOKEN_ID)): Logprob(
            logprob=logprob, rank=place if num_top == _ALL or place <= num_top else None
        )
        for place, (name, logprob) in enumerate(likeliest_first, start=1)
    }


def _prompt_logprobs(
    told: Sequence[Mapping[str, Mapping[str, Any]] | None] | None,
) -> list[dict[int, Logprob] | None] | None:
    """Convert a prompt's log-probabilities: one mapping per position, from a token id (a string in JSON) to its entry."""
    if told is None:
        return None
    return [
        None
        if position is None
        else {
            int(token_id): Logprob(
                logprob=entry["logprob"], rank=entry.get("rank"), decoded_token=entry.get("decoded_token")
            )
            for token_id, entry in position.items()
        }
        for position in told
    ]


def _plain(value: Any) -> Any:
    """Return a value in JSON's form: any sequence as a list."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
