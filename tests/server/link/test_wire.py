"""What ranks say comes back as it was said, whichever of its parts are empty."""

import itertools

from scheduler.policy.request import FinishReason, Logprobs, RankStats, RequestOutput
from server.link import ranks_pb2 as pb
from server.link import wire

ENTRY = Logprobs(5, -0.5, [5, 6], [-0.5, -1.5], 1)
TOKENS: tuple[list[int], ...] = ([], [5], [5, 6])
ENTRIES: tuple[list[Logprobs], ...] = ([], [ENTRY, ENTRY])


def test_every_combination_of_empty_parts_comes_back() -> None:
    parts = itertools.product(
        *(TOKENS, ENTRIES, ENTRIES, (0, 7), (0.0, 0.25), (None, *FinishReason), ("", "a fault"))
    )
    for token_ids, logprobs, prompt_logprobs, num_cached_tokens, queued_s, finish_reason, error in parts:
        output = RequestOutput(
            request_id="a",
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            queued_s=queued_s,
            finish_reason=finish_reason,
            error=error,
        )
        sent = wire.step_output_from([output], None).SerializeToString()
        (received,) = pb.StepOutput.FromString(sent).outputs
        back = wire.output_from(received)
        assert back == output and type(back.token_ids) is list


def test_stats_come_back() -> None:
    names = RankStats.__annotations__
    stats = RankStats(**{name: number for number, name in enumerate(names, start=1)})
    sent = wire.step_output_from([], stats).SerializeToString()
    assert wire.stats_from(pb.StepOutput.FromString(sent).stats) == stats
