"""A script as `deep_ep` users write it: CUDA literals, NCCL, spawned processes. It does not refer to WideEP."""

import sys

import deep_ep
import torch
import torch.distributed as dist
from deep_ep import Buffer, Config, ElasticBuffer, EPHandle, EventHandle, EventOverlap
from deep_ep.utils import EventHandle as SameHandle
from deep_ep.utils.envs import init_dist
from deep_ep.utils.math import (
    calc_diff,
    hash_tensor,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
)
from deep_ep.utils.testing import bench, bench_kineto


def work(local_rank: int, num_ranks: int, tokens: int) -> None:
    rank, world_size, group = init_dist(local_rank, num_ranks)
    torch.set_default_device("cuda")
    torch.cuda.set_device(local_rank)
    buffer = Buffer(group, int(1e6), explicitly_destroy=True)
    x = torch.full((tokens, 128), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    topk_idx = torch.arange(tokens, device=torch.device("cuda", 0)).view(-1, 1).to("cuda") % world_size
    topk_idx = topk_idx.to(deep_ep.topk_idx_t).cuda()
    weights = torch.ones((tokens, 1), dtype=torch.float32, device=f"cuda:{rank}")
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, world_size)
    fp8 = per_token_cast_to_fp8(x)
    recv, idx, _, counts, handle, event = buffer.dispatch(
        fp8, num_tokens_per_rank=per_rank, is_token_in_rank=mask, num_tokens_per_expert=per_expert, topk_idx=topk_idx,
        topk_weights=weights, config=Config(24), previous_event=EventOverlap(EventHandle()), async_finish=True,
    )  # fmt: skip
    event.current_stream_wait()
    recv_x = per_token_cast_back(*recv)
    assert counts == [recv_x.size(0)] and idx.eq(0).all()
    ends = handle[0][:, rank].tolist()
    for source, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        assert calc_diff(recv_x[start:end], torch.full_like(recv_x[start:end], source + 1)) < 1e-6, (
            "wrong rows"
        )
    combined, _, _ = buffer.combine(recv_x, handle)
    torch.cuda.synchronize()
    everything = torch.empty((world_size, tokens, 128), dtype=torch.bfloat16, device="cuda")
    dist.all_gather_into_tensor(everything, combined, group=group)
    assert hash_tensor(everything[rank]) == hash_tensor(x), "wrong sums"
    buffer.destroy()
    dist.barrier()
    if rank == 0:
        print("all ranks agree", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert SameHandle is EventHandle and ElasticBuffer.__name__ == "ElasticBuffer" and EPHandle
    repeated = torch.tensor([[1, 3, 1], [-1, 2, -1]])
    inplace_unique(repeated, 4)
    assert repeated.tolist() == [[3, 1, -1], [2, -1, -1]]
    assert (
        bench(lambda: 1 / 0)[0] > 0
        and bench_kineto(lambda: 1 / 0, ("a", "b"), num_kernels_per_period=2)[1][1] > 0
    )
    assert deep_ep.__version__.startswith("2.1.0")
    torch.multiprocessing.spawn(  # type: ignore[attr-defined]
        work, args=(2, int(sys.argv[1])), nprocs=2
    )
