"""The sequences of calls of vLLM, SGLang and Megatron, each as a small MoE layer with known bits.

The calls were read from their sources; this code is ours. Each expert multiplies by a different number.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer, Config, EventHandle, EventOverlap, fp8
from tests.fixtures import PoolOf

L, K, H, M = 2, 3, 128, 8  # experts per rank, choices, hidden size, maximum tokens


def draw(rank: int, E: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, choices and weights of a rank. Ranks have different numbers of tokens."""
    generator = torch.Generator().manual_seed(rank)
    T = M - rank
    topk_idx = torch.rand(T, E, generator=generator).topk(K).indices
    return torch.randn(T, H, generator=generator).bfloat16(), topk_idx, torch.rand(T, K, generator=generator)


def dense(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute the layer without an exchange."""
    return x.float() * (weights * (topk_idx + 1)).sum(1, keepdim=True)


def weighted_experts(
    recv_x: torch.Tensor, recv_idx: torch.Tensor, weights: torch.Tensor, rank: int
) -> torch.Tensor:
    """Return the weighted output of a rank's experts for its rows, as callers of normal mode compute it."""
    factor = torch.where(recv_idx >= 0, weights * (recv_idx + rank * L + 1), 0.0).sum(1, keepdim=True)
    return (recv_x.float() * factor).bfloat16()


def normal_layer(x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, R: int) -> torch.Tensor:
    """Return the exact result of normal mode: a rank's experts answer in one row, and ranks are added in order."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for rank in range(R):
        is_here = topk_idx // L == rank
        factor = torch.where(is_here, weights * (topk_idx + 1), 0.0).sum(1, keepdim=True)
        answer = (x.float() * factor).bfloat16()
        total += torch.where(is_here.any(1, keepdim=True), answer.float(), 0.0)
    return total.bfloat16()


def low_latency_layer(
    x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, *, use_fp8: bool = False
) -> torch.Tensor:
    """Return the exact result of low-latency mode: each choice's answer times its weight, added in the order of choices."""
    rows = fp8.dequantise_fp8(*fp8.quantise_fp8(x), torch.float32) if use_fp8 else x.float()
    total = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(K):
        answer = (rows * (topk_idx[:, k] + 1).unsqueeze(1)).bfloat16()
        total += weights[:, k].unsqueeze(1) * answer.float()
    return total.bfloat16()


def vllm_high_throughput() -> bool:
    group = dist.group.WORLD
    rank, R = dist.get_rank(), dist.get_world_size()
    buffer = Buffer(
        group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=1,
        explicitly_destroy=True,
    )  # fmt: skip
    buffer.set_num_sms(20)
    x, topk_idx, weights = draw(rank, R * L)
    per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(
        topk_idx=topk_idx,
        num_experts=R * L,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    )
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=mask,
        num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=weights, expert_alignment=1,
        config=Buffer.get_dispatch_config(R), previous_event=None, async_finish=True, allocate_on_comm_stream=False,
    )  # fmt: skip
    if event.event is not None:
        event.current_stream_wait()
    assert recv_idx is not None and sum(counts) == int((recv_idx >= 0).sum())
    y = weighted_experts(recv_x, recv_idx, recv_weights, rank)
    combined, _, event = buffer.combine(
        x=y, handle=handle, topk_weights=None, config=Buffer.get_combine_config(R), previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    )  # fmt: skip
    assert event.event is None
    buffer.destroy()
    return torch.equal(combined, normal_layer(x, topk_idx, weights, R))


def low_latency_experts(recv_x: Any, counts: torch.Tensor, rank: int) -> torch.Tensor:
    """Answer each expert's valid rows. The others stay undefined, here NaN."""
    values = (
        recv_x[0].float() * recv_x[1].float().repeat_interleave(128, dim=-1)
        if isinstance(recv_x, tuple)
        else recv_x
    )
    y = torch.full(values.shape, torch.nan, dtype=torch.bfloat16)
    for local, count in enumerate(counts.tolist()):
        y[local, :count] = (values[local, :count].float() * (rank * L + local + 1)).bfloat16()
    return y


def vllm_low_latency() -> bool:
    rank, R = dist.get_rank(), dist.get_world_size()
    num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank=M, hidden=H, num_ranks=R, num_experts=R * L
    )
    buffer = Buffer(
        group=dist.group.WORLD, num_nvl_bytes=1 << 20, num_rdma_bytes=num_rdma_bytes, low_latency_mode=True,
        num_qps_per_rank=L, allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True,
        enable_shrink=True,
    )  # fmt: skip
    x, topk_idx, weights = draw(rank, R * L)
    oks = []
    for use_fp8 in (False, True):
        recv_x, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, topk_idx, M, R * L, use_fp8=use_fp8, round_scale=False, use_ue8m0=False, async_finish=False,
            return_recv_hook=True,
        )  # fmt: skip
        hook()
        out = torch.empty_like(x)
        _, _, hook = buffer.low_latency_combine(
            low_latency_experts(recv_x, counts, rank), topk_idx, weights, handle, async_finish=False, zero_copy=False,
            return_recv_hook=True, out=out,
        )  # fmt: skip
        hook()
        oks.append(torch.equal(out, low_latency_layer(x, topk_idx, weights, use_fp8=use_fp8)))
    mask = torch.full((R,), 7, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    buffer.low_latency_clean_mask_buffer()
    buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_()
    buffer.destroy()
    return all(oks) and mask.tolist() == [0] * R


def sglang() -> bool:
    """Run both modes of one buffer in turn, with configs from JSON, aligned counts, hooks, and an unused argument of a fork."""
    rank, R = dist.get_rank(), dist.get_world_size()
    config = Config(num_sms=24, num_max_nvl_chunked_send_tokens=8, num_max_nvl_chunked_recv_tokens=256)
    hidden_bytes = 2 * H
    sizes = (
        config.get_nvl_buffer_size_hint(hidden_bytes, R),
        config.get_rdma_buffer_size_hint(hidden_bytes, R),
    )
    buffer = Buffer(
        dist.group.WORLD,
        *sizes,
        low_latency_mode=True,
        num_qps_per_rank=Buffer.num_sms // 2,
        allow_mnnvl=True,
    )
    assert buffer.low_latency_mode and buffer.group_size == R
    x, topk_idx, weights = draw(rank, R * L)
    oks = []
    for _ in range(2):
        previous = Buffer.capture()
        per_rank, per_node, per_expert, mask, previous = buffer.get_dispatch_layout(
            topk_idx, R * L, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask, num_tokens_per_expert=per_expert, previous_event=previous, async_finish=True,
            allocate_on_comm_stream=True, expert_alignment=128, config=config,
        )  # fmt: skip
        event.current_stream_wait()
        assert all(count % 128 == 0 for count in counts)
        combined, _, event = buffer.combine(
            weighted_experts(recv_x, recv_idx, recv_weights, rank), handle, async_finish=True,
            previous_event=Buffer.capture(), allocate_on_comm_stream=True, config=config,
        )  # fmt: skip
        event.current_stream_wait()
        oks.append(torch.equal(combined, normal_layer(x, topk_idx, weights, R)))
        buffer.clean_low_latency_buffer(M, H, R * L)
        recv, received, ll_handle, event, hook = buffer.low_latency_dispatch(
            x, topk_idx, M, R * L, use_fp8=False, async_finish=False, return_recv_hook=True, use_nvfp4=False
        )
        hook()
        combined, event, hook = buffer.low_latency_combine(
            low_latency_experts(recv, received, rank),
            topk_idx,
            weights,
            ll_handle,
            async_finish=True,
            overlap=None,
        )
        event.current_stream_wait()
        oks.append(torch.equal(combined, low_latency_layer(x, topk_idx, weights)))
    return all(oks)


class FusedDispatch(torch.autograd.Function):
    """Dispatch. Its backward pass combines."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, buffer: Buffer
    ) -> Any:
        E = L * buffer.group_size
        previous = EventOverlap(EventHandle())
        per_rank, per_node, per_expert, mask, previous = buffer.get_dispatch_layout(
            topk_idx, num_experts=E, previous_event=previous, async_finish=True, allocate_on_comm_stream=True
        )
        recv_x, recv_idx, recv_weights, _, handle, event = buffer.dispatch(
            x, topk_idx=topk_idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask, num_tokens_per_expert=per_expert, previous_event=previous, async_finish=True,
            allocate_on_comm_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        ctx.buffer, ctx.handle = buffer, handle
        ctx.mark_non_differentiable(recv_idx)
        return recv_x, recv_idx, recv_weights, handle

    @staticmethod
    def backward(ctx: Any, grad_x: torch.Tensor, _: Any, grad_weights: torch.Tensor, __: Any) -> Any:
        x, weights, event = ctx.buffer.combine(
            grad_x.contiguous(), ctx.handle, topk_weights=grad_weights.float(), previous_event=Buffer.capture(),
            async_finish=True, allocate_on_comm_stream=True,
        )  # fmt: skip
        event.current_stream_wait()
        return x, None, weights, None


class FusedCombine(torch.autograd.Function):
    """Combine. Its backward pass dispatches by the handle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: Buffer, handle: Any) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined, _, event = buffer.combine(x, handle=handle, async_finish=True)
        event.current_stream_wait()
        return combined

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        got, _, _, _, _, event = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle, async_finish=True)
        event.current_stream_wait()
        return got, None, None


def megatron() -> bool:
    """Run a layer forward and backward. Gradients of tokens and weights must equal those of the dense layer."""
    rank, R = dist.get_rank(), dist.get_world_size()
    buffer = Buffer(dist.group.WORLD, 1 << 20, 0)
    Buffer.set_num_sms(20)
    x, topk_idx, weights = draw(rank, R * L)
    x, weights = x.float().requires_grad_(), weights.requires_grad_()
    recv_x, recv_idx, recv_weights, handle = FusedDispatch.apply(x, topk_idx, weights, buffer)
    factor = torch.where(recv_idx >= 0, recv_weights * (recv_idx + rank * L + 1), 0.0).sum(1, keepdim=True)
    combined = FusedCombine.apply(recv_x * factor, buffer, handle)
    wanted_x, wanted_weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    wanted = dense(wanted_x, topk_idx, wanted_weights)
    combined.square().sum().backward()
    wanted.square().sum().backward()
    pairs = [(combined, wanted), (x.grad, wanted_x.grad), (weights.grad, wanted_weights.grad)]
    return all(torch.allclose(ours, theirs, rtol=1e-4, atol=1e-3) for ours, theirs in pairs)


@pytest.mark.crossed("caller", "world_size", every=2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("caller", [vllm_high_throughput, vllm_low_latency, sglang, megatron])
def test_a_callers_sequence_gives_the_layers_bits(pool_of: PoolOf, caller: Any, world_size: int) -> None:
    assert pool_of(world_size).run(caller) == [True] * world_size
