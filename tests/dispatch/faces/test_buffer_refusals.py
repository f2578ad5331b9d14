"""Bad input to `dispatch.Buffer`: a named error on every rank before anything is sent, and the next call works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer, Config, EventHandle
from tests.fixtures import PoolOf

T, H, K = 3, 16, 2
Arguments = dict[str, Any]


def good_call(buffer: Buffer) -> tuple[Arguments, Arguments]:
    """Return valid arguments of a dispatch and of a combine."""
    E = buffer.group_size
    topk_idx = torch.arange(T * K).view(T, K) % E
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, E)
    dispatch: Arguments = {
        "x": torch.ones(T, H, dtype=torch.bfloat16),
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(T, K),
    }
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(**dispatch)
    return dispatch, {"x": recv_x, "handle": handle, "topk_weights": recv_weights}


def written_to(handle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (handle[0] - 1, *handle[1:])


DISPATCH: dict[str, tuple[Callable[[Arguments, Any], Arguments], str]] = {
    "x no tensor": (lambda a, h: {"x": [1]}, r"x is list; it must be a tensor, or a tuple"),
    "x 3-d": (lambda a, h: {"x": torch.ones(T, 2, 2)}, r"x is torch.float32 \[3, 2, 2\]"),
    "x integers": (lambda a, h: {"x": torch.ones(T, H).int()}, "x is torch.int32.*floating type"),
    "x of four bytes with scales": (
        lambda a, h: {"x": (torch.ones(T, H), torch.ones(T, 1))},
        "with scales it must be of a type of one byte",
    ),
    "scales of another type": (
        lambda a, h: {"x": (torch.ones(T, H).to(torch.float8_e4m3fn), torch.ones(T, 1).double())},
        "x's scales are torch.float64.*must be float32, or int32",
    ),
    "scales of other tokens": (
        lambda a, h: {"x": (torch.ones(T, H).to(torch.float8_e4m3fn), torch.ones(T + 1, 1))},
        "one row for each of x's 3 tokens",
    ),
    "no layout": (lambda a, h: {"is_token_in_rank": None}, "is_token_in_rank is None; without a handle"),
    "mask of other tokens": (
        lambda a, h: {"is_token_in_rank": a["is_token_in_rank"][1:]},
        r"is_token_in_rank is torch.bool \[2, \d\].*bool \[3, \d\]",
    ),
    "mask elsewhere": (
        lambda a, h: {"is_token_in_rank": a["is_token_in_rank"].to("meta")},
        "is_token_in_rank is .* on meta; it must be on cpu, as x",
    ),
    "weights elsewhere": (
        lambda a, h: {"topk_weights": a["topk_weights"].to("meta")},
        "topk_weights is .* on meta; it must be on cpu, as x",
    ),
    "mask of integers": (
        lambda a, h: {"is_token_in_rank": a["is_token_in_rank"].int()},
        "must be torch.bool",
    ),
    "counts that do not fit": (
        lambda a, h: {"num_tokens_per_rank": a["num_tokens_per_rank"] + 1},
        "num_tokens_per_rank is .* but is_token_in_rank has .*same get_dispatch_layout",
    ),
    "long counts": (
        lambda a, h: {"num_tokens_per_rank": a["num_tokens_per_rank"].long()},
        "num_tokens_per_rank is torch.int64.*int32",
    ),
    "experts that do not divide": (
        lambda a, h: {"num_tokens_per_expert": a["num_tokens_per_expert"][1:]},
        r"num_tokens_per_expert is torch.int32 \[\d\].*multiple of",
    ),
    "expert out of range": (
        lambda a, h: {"topk_idx": a["topk_idx"] + 100},
        r"topk_idx\[0, 0\] is 100; it must be -1 or in \[0, \d\)",
    ),
    "expert below -1": (lambda a, h: {"topk_idx": a["topk_idx"] - 2}, r"topk_idx\[0, 0\] is -2"),
    "choices of floats": (lambda a, h: {"topk_idx": a["topk_idx"].float()}, "topk_idx is torch.float32"),
    "choices without weights": (
        lambda a, h: {"topk_weights": None},
        "topk_weights is None but topk_idx is not",
    ),
    "weights without choices": (lambda a, h: {"topk_idx": None}, "topk_idx is None but topk_weights is not"),
    "weights of another type": (
        lambda a, h: {"topk_weights": a["topk_weights"].bfloat16()},
        r"topk_weights is torch.bfloat16.*float32 \[3, 2\]",
    ),
    "alignment 0": (lambda a, h: {"expert_alignment": 0}, "expert_alignment is 0; it must be at least 1"),
    "negative worst": (lambda a, h: {"num_worst_tokens": -1}, "num_worst_tokens is -1"),
    "worst without choices": (
        lambda a, h: {"num_worst_tokens": 99, "topk_idx": None, "topk_weights": None},
        "num_worst_tokens is 99; it must be 0, or positive with topk_idx",
    ),
    "a dict as config": (lambda a, h: {"config": {"num_sms": 20}}, "config is builtins.dict"),
    "an event of another type": (lambda a, h: {"previous_event": 3}, "previous_event is int"),
    "a handle with choices": (
        lambda a, h: {"handle": h},
        "topk_idx and topk_weights must be None with a handle",
    ),
    "a handle of another type": (
        lambda a, h: {"handle": (1, 2), "topk_idx": None, "topk_weights": None},
        "handle is tuple of 2; it must be the tuple of 6",
    ),
    "a handle of other tokens": (
        lambda a, h: {"handle": h, "x": a["x"][:1], "topk_idx": None, "topk_weights": None},
        "x has 1 tokens; the handle's dispatch had 3",
    ),
    "a handle written to": (
        lambda a, h: {"handle": written_to(h), "topk_idx": None, "topk_weights": None},
        "prefix matrix does not fit its other tensors",
    ),
    "a fork's argument": (
        lambda a, h: {"use_nvfp4": True},
        "dispatch got use_nvfp4; DeepEP's V1 interface has no such argument",
    ),
}

COMBINE: dict[str, tuple[Callable[[Arguments, Any], Arguments], str]] = {
    "rows missing": (
        lambda a, h: {"x": a["x"][:-1]},
        "x has . rows; the handle's dispatch returned .",
    ),
    "x of integers": (lambda a, h: {"x": a["x"].int()}, "x is torch.int32"),
    "weights of other rows": (
        lambda a, h: {"topk_weights": a["topk_weights"][:-1]},
        r"topk_weights is torch.float32 \[\d, 2\].*float32 \[\d, num_topk\]",
    ),
    "bias of another type": (
        lambda a, h: {"bias": torch.ones(T, H)},
        r"bias is torch.float32.*torch.bfloat16 \[3, 16\]",
    ),
    "bias elsewhere": (
        lambda a, h: {"bias": torch.ones(T, H, device="meta").bfloat16()},
        "bias is .* on meta; it must be on cpu, as x",
    ),
    "bias of another shape": (lambda a, h: {"bias": torch.ones(T, 1).bfloat16()}, r"bias is .*\[3, 1\]"),
    "three biases": (
        lambda a, h: {"bias": (torch.ones(T, H).bfloat16(),) * 3},
        "bias is a tuple of 3; it must be a tensor or a tuple of two",
    ),
    "no handle": (lambda a, h: {"handle": None}, "handle is None; it must be the tuple of 6"),
    "a fork's argument": (lambda a, h: {"block_m": 64}, "combine got block_m; DeepEP's V1"),
}
CALLS = {"dispatch": DISPATCH, "combine": COMBINE}


def call_badly(name: str, method: str) -> dict[str, str]:
    """Make each bad call on the last rank and a good one on the others, then a good call on all."""
    buffer = Buffer(dist.group.WORLD, backend=name, timeout_s=20.0)
    raised = {}
    for case, (change, _) in CALLS[method].items():
        good_dispatch, good_combine = good_call(buffer)
        good = good_dispatch if method == "dispatch" else good_combine
        is_bad = buffer.rank == buffer.group_size - 1
        called = good | change(good, good_combine["handle"]) if is_bad else good
        try:
            getattr(buffer, method)(**called)
            raised[case] = "nothing"
        except (ValueError, TypeError) as error:
            raised[case] = f"{type(error).__name__}: {error}"
        combined = buffer.combine(**good_combine)[0]
        assert torch.equal(
            combined, good_dispatch["is_token_in_rank"].sum(1, keepdim=True).expand(T, H).bfloat16()
        )
    return raised


@pytest.mark.crossed("name", "world_size", "method", every=2)
@pytest.mark.parametrize("method", ["dispatch", "combine"])
@pytest.mark.parametrize(("name", "world_size"), [("auto", 1), ("shm", 2), ("gloo", 2), ("shm", 4)])
def test_bad_arguments_are_named_on_every_rank(
    pool_of: PoolOf, name: str, world_size: int, method: str
) -> None:
    raised = pool_of(world_size).run(call_badly, name, method)
    for case, (_, message) in CALLS[method].items():
        kind = "TypeError" if "fork" in case else "ValueError"
        bad = raised[-1][case]
        assert bad.startswith(f"{kind}: "), f"{case}: {bad}"
        with pytest.raises(ValueError, match=message):
            raise ValueError(bad)
        for other in raised[:-1]:
            text = bad.removeprefix(f"{kind}: ")
            assert other[case] == f"PeerRefused: rank {world_size - 1} refused the call: {text}"


def overflow() -> list[str]:
    """Let rank 0 receive more than it has room for. All ranks must report it."""
    buffer = Buffer(dist.group.WORLD, backend="shm", timeout_s=20.0)
    good, combine = good_call(buffer)
    texts = []
    for change in (
        {"num_worst_tokens": 2 if buffer.rank == 0 else 100},
        {"x": torch.ones(T, 2 * H + buffer.rank)},
    ):
        try:
            buffer.dispatch(**(good | change))
        except Exception as error:  # noqa: BLE001 - what is raised is the result
            texts.append(f"{type(error).__name__}: {error}")
        buffer.combine(**combine)
    return texts


def test_too_few_worst_tokens_and_other_sizes_reach_every_rank(pool_of: PoolOf) -> None:
    results = pool_of(2).run(overflow)
    for rank, (worst, sizes) in enumerate(results):
        assert worst.startswith("ValueError: num_worst_tokens is 2 on rank 0, which receives 6 tokens")
        own = f"RanksDisagree: rank {rank} called 'dispatch over 2 experts: float32 [{2 * H + rank}]"
        assert sizes.startswith(own) and f"; rank {1 - rank} made another call than rank {rank}'s" in sizes
        assert "its bytes per row is " in sizes


STRICT: dict[str, tuple[Callable[[Arguments, Any], Arguments], str]] = {
    "float32": (lambda a, h: {"x": torch.ones(T, H)}, "DeepEP supports bfloat16, or float8"),
    "strides": (lambda a, h: {"x": torch.ones(H, T).bfloat16().T}, r"x has strides \[1, 3\]"),
    "odd rows": (lambda a, h: {"x": torch.ones(T, 7).bfloat16()}, "x has rows of 14 bytes.*multiple of 16"),
    "stream": (lambda a, h: {"allocate_on_comm_stream": True}, "allocate_on_comm_stream is True"),
}


def call_strictly(node_size: int) -> dict[str, str]:
    buffer = Buffer(dist.group.WORLD, strict=True, backend="shm", timeout_s=20.0, node_size=node_size)
    good, _ = good_call(buffer)
    cases = dict(STRICT)
    if node_size == 1:
        cases["worst"] = (lambda a, h: {"num_worst_tokens": 99}, "")
        cases["nodes"] = (lambda a, h: {"num_tokens_per_rdma_rank": None}, "")
    raised = {}
    for case, (change, _) in cases.items():
        try:
            buffer.dispatch(**(good | change(good, None)))
        except ValueError as error:
            raised[case] = str(error)
    return raised


def test_strict_refuses_what_deep_ep_cannot_do(pool_of: PoolOf) -> None:
    one_node, two_nodes = pool_of(2).run(call_strictly, 8)[0], pool_of(2).run(call_strictly, 1)[0]
    for case, (_, message) in STRICT.items():
        with pytest.raises(ValueError, match=message):
            raise ValueError(one_node[case])
        assert "(strict=True)" in one_node[case]
    assert "DeepEP supports it within a node only" in two_nodes["worst"]
    assert "num_tokens_per_rdma_rank is None" in two_nodes["nodes"]


def construct() -> list[str]:
    group, texts = dist.group.WORLD, []
    attempts: list[Callable[[], Any]] = [
        lambda: Buffer(None),
        lambda: Buffer(None, comm=object()),
        lambda: Buffer(group, node_size=0),
        lambda: Buffer(group, 100, strict=True),
        lambda: Buffer(group, backend="carrier pigeon"),
        lambda: Buffer(group).destroy(),
        lambda: Buffer(group).get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), 3),
        lambda: Buffer(group).get_dispatch_layout(torch.tensor([[4]]), 4),
        lambda: Buffer(group, 0, 0, bogus=1),  # type: ignore[call-arg]
    ]
    for attempt in attempts:
        try:
            attempt()
            texts.append("nothing")
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    return texts


def test_what_makes_no_sense_is_refused_when_a_buffer_is_made(pool_of: PoolOf) -> None:
    wanted = [
        "group is None; it must be a torch.distributed process group",
        "comm is builtins.object; ranks connect over torch.distributed here",
        "node_size is 0",
        "num_nvl_bytes is 100; DeepEP needs a multiple of 128",
        "carrier pigeon",
        "explicitly_destroy is False",
        "num_experts is 3; it must be a positive multiple of the 2 ranks",
        "topk_idx[0, 0] is 4; it must be -1 or in [0, 4)",
        "bogus",
    ]
    for texts in pool_of(2).run(construct):
        for text, part in zip(texts, wanted, strict=True):
            assert part in text


def test_an_event_without_work_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="async_finish=True"):
        Buffer.capture().__class__().current_stream_wait()


def test_configs_that_deep_ep_could_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_max_nvl_chunked_send_tokens is 300.*which is 256"):
        Config(20, 300)
    with pytest.raises(ValueError, match=r"num_max_rdma_chunked_send_tokens is 300.*at most half"):
        Config(num_max_rdma_chunked_send_tokens=300)
    with pytest.raises(ValueError, match="num_sms is -1"):
        Config(-1)
    with pytest.raises(ValueError, match="hidden_bytes is 0"):
        Config().get_nvl_buffer_size_hint(0, 2)
    assert EventHandle().current_stream_wait() is None  # type: ignore[func-returns-value]
