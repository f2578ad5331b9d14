"""ElasticBuffer rejects bad calls with a named error on every rank, and the next call works."""

from typing import Any

import pytest
import torch

from dispatch.errors import DispatchError
from dispatch.faces.elastic import ElasticBuffer
from tests.dispatch.faces.elastic_oracle import E, open_buffer
from tests.fixtures import PoolOf


def refuse_all(calls: list[dict[str, Any]]) -> list[tuple[str, str, bool]]:
    """Make each bad call on rank 1, then a good one on all ranks."""
    buffer = open_buffer(explicitly_destroy=True)
    x, idx = torch.ones(2, 8), torch.tensor([[0, 7], [3, -1]])
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "topk_weights": torch.ones(2, 2), "num_experts": E}
    outcomes = []
    for call in calls:
        name, text = "none", ""
        bad = good | call if buffer.rank_idx == 1 else good
        try:
            result = buffer.dispatch(**{k: v for k, v in bad.items() if not k.startswith("combine_")})
            answers = bad.get("combine_x", result[0])
            buffer.combine(answers, bad.get("combine_handle", result[3]), bias=bad.get("combine_bias"))
        except (ValueError, DispatchError) as error:
            name, text = type(error).__name__, str(error)
        recv, _, _, handle, _ = buffer.dispatch(**good)
        combined, _, _ = buffer.combine(recv, handle)
        outcomes.append((name, text, combined[:, 0].tolist() == [2, 1]))  # number of ranks of each token
    buffer.destroy()
    return outcomes


BAD = {
    "topk_idx[1, 0] is 8; it must be -1 or in [0, 8)": {"topk_idx": torch.tensor([[0, 1], [8, 2]])},
    "topk_idx has 3 tokens and x 2": {"topk_idx": torch.tensor([[0, 1]] * 3), "topk_weights": None},
    "topk_idx[0] is [3, 3]; a token's experts must differ": {"topk_idx": torch.tensor([[3, 3], [1, 2]])},
    "num_experts is 7; it must be a positive multiple of the 2 ranks": {"num_experts": 7},
    "x has 13 tokens; num_max_tokens_per_rank is 12": {"x": torch.ones(13, 8)},
    "topk_weights is torch.float64": {"topk_weights": torch.ones(2, 2, dtype=torch.float64)},
    "expert_alignment is 0": {"expert_alignment": 0},
    "do_zero_padding is True but do_expand is False": {"do_zero_padding": True},
    "previous_event is str": {"previous_event": "now", "allocate_on_comm_stream": True},
    "previous_event is given but allocate_on_comm_stream is False": {
        "previous_event": ElasticBuffer.capture()
    },
    "cumulative_local_expert_recv_stats is torch.int32 [3]": {
        "cumulative_local_expert_recv_stats": torch.zeros(3, dtype=torch.int32)
    },
    "handle is str": {"handle": "mine"},
    "x's scales are torch.float32 [2]": {"x": (torch.ones(2, 8, dtype=torch.uint8), torch.ones(2))},
    "x has 1 rows; the handle": {"combine_x": torch.ones(1, 8)},
    "bias is torch.float32 [1, 8]": {"combine_bias": torch.ones(1, 8)},
    "bias is a tuple of 3": {"combine_bias": (torch.ones(2, 8),) * 3},
    "handle is NoneType": {"combine_handle": None},
}


def test_bad_arguments_are_an_error_on_every_rank_and_the_next_call_works(pool_of: PoolOf) -> None:
    results = pool_of(2).run(refuse_all, list(BAD.values()))
    for text, at_good, at_bad in zip(BAD, *results, strict=True):
        assert (at_bad[0], at_bad[2]) == ("ValueError", True), at_bad
        assert (at_good[0], at_good[2]) == ("PeerRefused", True), at_good
        assert text in at_bad[1] and f"rank 1 refused the call: {text}" in at_good[1]


def disagree(given: dict[int, dict[str, Any]]) -> tuple[str, bool]:
    buffer = open_buffer(explicitly_destroy=True)
    x, idx = torch.ones(2, 8), torch.tensor([[0, 7], [3, -1]])
    good: dict[str, Any] = {"x": x, "topk_idx": idx, "num_experts": E}
    try:
        buffer.dispatch(**good | given.get(buffer.rank_idx, {}))
        name = "none"
    except DispatchError as error:
        name = type(error).__name__
    buffer.dispatch(**good)
    buffer.barrier()
    buffer.destroy()
    return name, True


@pytest.mark.parametrize(
    "other",
    [
        {"num_experts": 16},
        {"num_max_tokens_per_rank": 13},
        {"x": torch.ones(2, 4)},
        {"topk_weights": torch.ones(2, 2)},
    ],
)
def test_ranks_that_disagree_are_told_and_go_on(pool_of: PoolOf, other: dict[str, Any]) -> None:
    assert pool_of(2).run(disagree, {1: other}) == [("RanksDisagree", True)] * 2


def open_wrongly(options: dict[str, Any]) -> str:
    try:
        open_buffer(**options)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"node_size": 3}, "node_size is 3 for 2 ranks; it must be one of [1, 2]"),
        ({"num_cpu_bytes": 1 << 21}, "engram storage is not supported"),
        ({"num_bytes": 5, "strict": True}, "num_bytes is 5"),
    ],
)
def test_a_buffer_that_cannot_be_is_refused_by_name(
    pool_of: PoolOf, options: dict[str, Any], message: str
) -> None:
    assert all(message in text for text in pool_of(2).run(open_wrongly, options))


def test_a_group_is_needed() -> None:
    with pytest.raises(ValueError, match=r"it must be a torch\.distributed process group"):
        ElasticBuffer(None)  # type: ignore[arg-type]


def strict_texts() -> list[str]:
    buffer = open_buffer(strict=True, explicitly_destroy=True)
    texts = []
    for x in (torch.ones(2, 8), torch.ones(2, 3, dtype=torch.bfloat16)):
        try:
            buffer.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), num_experts=E)
        except ValueError as error:
            texts.append(str(error))
    buffer.destroy()
    return texts


def test_strict_keeps_deepeps_limits(pool_of: PoolOf) -> None:
    float_text, odd_text = pool_of(1).run(strict_texts)[0]
    assert "DeepEP supports bfloat16" in float_text and "DeepEP needs a multiple of 16" in odd_text
