"""Between the vocabulary of `scheduler.policy.request` and the messages of ranks.proto: pure functions, both ways.

Knows no connection. Times cross the wire as time-outs, because the clocks of two machines differ.
"""

from dataclasses import asdict, dataclass
from typing import Any

from scheduler.policy.request import (
    FinishReason,
    Logprobs,
    RankStats,
    Request,
    RequestOutput,
    SamplingParams,
    Structure,
    TokenBias,
)
from server.link import ranks_pb2 as pb

_TO_WIRE = {None: pb.UNFINISHED} | {reason: getattr(pb, reason.name) for reason in FinishReason}
_FROM_WIRE = {wire: reason for reason, wire in _TO_WIRE.items()}


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank says about itself when it attaches."""

    rank: int
    world_size: int
    host: str
    pid: int
    max_model_len: int  # tokens, prompt plus output
    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    num_restarts: int = 0  # of this rank's engine; 0: it started with the service


def hello_from(facts: RankFacts) -> pb.Hello:
    """Encode a rank's facts."""
    return pb.Hello(**asdict(facts))


def facts_from(hello: pb.Hello) -> RankFacts:
    """Decode a rank's facts."""
    return RankFacts(**{field.name: getattr(hello, field.name) for field in pb.Hello.DESCRIPTOR.fields})


def submit_from(request: Request, *, now_s: float) -> pb.Submit:
    """Encode a request; `now_s` is time.monotonic() here.

    A deadline that has passed travels as the smallest time-out, never as 0, which means none.
    """
    timeout_s = 0.0 if request.deadline_s is None else max(request.deadline_s - now_s, 1e-3)
    return pb.Submit(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        params=_params_to_wire(request.params),
        timeout_s=timeout_s,
        replayed_ids=request.replayed_ids,
    )


def request_from(submit: pb.Submit, *, now_s: float) -> Request:
    """Decode a request that arrives at `now_s`, time.monotonic() here."""
    return Request(
        request_id=submit.request_id,
        prompt_ids=tuple(submit.prompt_ids),
        params=_params_from(submit.params),
        arrival_s=now_s,
        deadline_s=now_s + submit.timeout_s if submit.timeout_s > 0 else None,
        replayed_ids=tuple(submit.replayed_ids),
    )


def _params_to_wire(params: SamplingParams) -> pb.SamplingParams:
    fields: dict[str, Any] = {name: value for name, value in vars(params).items() if value is not None}
    fields["bad_words"] = [pb.TokenSequence(token_ids=word) for word in params.bad_words]
    biases = fields.pop("logit_bias")
    fields["bias_token_ids"] = [each.token_id for each in biases]
    fields["biases"] = [each.bias for each in biases]
    if params.structure is not None:
        fields["structure"] = pb.Structure(**asdict(params.structure))
    return pb.SamplingParams(**fields)


def _params_from(wire: pb.SamplingParams) -> SamplingParams:
    """Decode sampling parameters, whose floats the wire carries in 64 bits, so that nothing is rounded."""
    return SamplingParams(
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        seed=wire.seed,
        stop_token_ids=tuple(wire.stop_token_ids),
        num_logprobs=wire.num_logprobs if wire.HasField("num_logprobs") else None,
        structure=_structure_from(wire.structure) if wire.HasField("structure") else None,
        logprob_token_ids=tuple(wire.logprob_token_ids),
        num_prompt_logprobs=wire.num_prompt_logprobs if wire.HasField("num_prompt_logprobs") else None,
        allowed_token_ids=tuple(wire.allowed_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in wire.bad_words),
        logit_bias=tuple(map(TokenBias, wire.bias_token_ids, wire.biases)),
    )


def _structure_from(wire: pb.Structure) -> Structure:
    return Structure(wire.kind, wire.text, wire.after)


_STATS_FIELDS = tuple(field.name for field in pb.RankStats.DESCRIPTOR.fields)


def step_output_from(outputs: list[RequestOutput], stats: RankStats | None) -> pb.StepOutput:
    """Encode what a rank has to say after one or more steps."""
    return pb.StepOutput(
        outputs=[_output_to_wire(output) for output in outputs],
        stats=None if stats is None else pb.RankStats(**vars(stats)),
    )


def _output_to_wire(output: RequestOutput) -> pb.RequestOutput:
    """Encode one request's; every token of every stream passes here and `output_from`, so what is empty is left out."""
    message = pb.RequestOutput(request_id=output.request_id, token_ids=output.token_ids)
    if output.logprobs:
        message.logprobs.extend(pb.TokenLogprobs(**entry._asdict()) for entry in output.logprobs)
    if output.prompt_logprobs:
        message.prompt_logprobs.extend(
            pb.TokenLogprobs(**entry._asdict()) for entry in output.prompt_logprobs
        )
    if output.num_cached_tokens:
        message.num_cached_tokens = output.num_cached_tokens
    if output.queued_s:
        message.queued_s = output.queued_s
    if output.finish_reason is not None:
        message.finish_reason = _TO_WIRE[output.finish_reason]
    if output.error:
        message.error = output.error
    return message


def output_from(wire: pb.RequestOutput) -> RequestOutput:
    """Decode what a rank says about one request."""
    logprobs, prompt_logprobs = wire.logprobs, wire.prompt_logprobs
    return RequestOutput(
        request_id=wire.request_id,
        token_ids=wire.token_ids[:],
        logprobs=[_logprobs_from(entry) for entry in logprobs] if logprobs else [],
        prompt_logprobs=[_logprobs_from(entry) for entry in prompt_logprobs] if prompt_logprobs else [],
        num_cached_tokens=wire.num_cached_tokens,
        queued_s=wire.queued_s,
        finish_reason=_FROM_WIRE[wire.finish_reason],
        error=wire.error,
    )


def _logprobs_from(wire: pb.TokenLogprobs) -> Logprobs:
    return Logprobs(wire.token_id, wire.logprob, list(wire.top_ids), list(wire.top_logprobs), wire.rank)


def stats_from(wire: pb.RankStats) -> RankStats:
    """Decode a rank's state."""
    return RankStats(**{name: getattr(wire, name) for name in _STATS_FIELDS})
