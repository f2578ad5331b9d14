"""NVSHMEM memory, with a fake of its Python package over the memory of a process. Nothing here ran on a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dispatch.errors import WireUnavailable
from tests.dispatch.exchange import catch
from tests.support.ranks import RankPool

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.gpu import nvshmem

CPU = torch.device("cpu")
PEER_AT = 0x7000_0000_0000


class StandIn:
    """The functions of nvshmem.core that the provider calls. `reachable` are the peers with an address."""

    class NvshmemError(Exception):
        """Same name as NVSHMEM4Py's."""

    NvshmemKernelObject = SimpleNamespace(from_handle=lambda handle: ("module", handle))

    def __init__(self, reachable: tuple[int, ...]) -> None:
        self.reachable = reachable
        self.num_buffers = 0
        self.initialised: list[Any] = []
        self.started: dict[str, Any] = {}

    def get_unique_id(self, empty: bool = False) -> Any:
        return SimpleNamespace(_data=np.full(128, 0 if empty else 7, dtype=np.int8))

    def init(self, **arguments: Any) -> None:
        self.started = {**arguments, "uid": arguments["uid"]._data.tolist()}

    def buffer(self, size: int) -> torch.Tensor:
        self.num_buffers += 1
        return torch.full((size,), 1, dtype=torch.int8)

    def get_peer_buffer(self, buffer: torch.Tensor, peer: int) -> Any:
        if peer not in self.reachable:
            raise self.NvshmemError("Failed to retrieve peer buffer")
        return SimpleNamespace(handle=PEER_AT + peer)

    def module_init(self, module: Any) -> None:
        self.initialised.append(module)

    def free(self, buffer: torch.Tensor) -> None:
        dist.barrier()  # as NVSHMEM does: it would wait for a lost peer
        raise AssertionError("closing must not involve other ranks")


def open_twice(reachable: tuple[int, ...]) -> dict[str, Any]:
    """Open, grow (open larger memory, then close both), open again, and then request other ranks."""
    core, process = StandIn(reachable), nvshmem._Process()
    nvshmem.find_device_library = lambda: "libnvshmem_device.bc"

    def open_memory(size: int, group: Any = dist.group.WORLD) -> Any:
        return nvshmem.NvshmemMemory(group, size, CPU, core, process)

    memory, larger = open_memory(256), open_memory(512)
    facts = {
        "peers": larger.peers.tolist(),
        "own": larger.base,
        "most": int(larger.memory.max()),
        "reach": larger.reach,
    }
    memory.memory[:] = 9
    memory.close()
    larger.close()
    again = open_memory(300)
    from triton import knobs  # noqa: PLC0415 - ranks decide first whether to interpret

    knobs.runtime.kernel_load_end_hook(11, 0, "send_rows", {}, "")
    knobs.runtime.kernel_load_end_hook(12, 0, "order_pairs", {}, "")
    alone = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    return {
        **facts,
        "started": core.started,
        "again": (
            again.base == facts["own"],
            again.memory.numel(),
            int(again.memory.max()),
            core.num_buffers,
        ),
        "initialised": set(core.initialised),
        "refusal": catch(lambda: open_memory(256, alone[dist.get_rank()])),
    }


@pytest.mark.parametrize("reachable", [(0, 1), ()])
def test_ranks_get_zeroed_memory_and_the_addresses_of_those_that_have_one(
    reachable: tuple[int, ...],
) -> None:
    with RankPool(2, timeout_s=60.0) as pool:
        results = pool.run(open_twice, reachable)
    for rank, result in enumerate(results):
        peer = 1 - rank
        addresses = {rank: result["own"], peer: PEER_AT + peer if reachable else 0}
        assert result["peers"] == [addresses[0], addresses[1]] and result["most"] == 0
        assert result["again"] == (True, 300, 0, 2), "closed memory must be reused and zeroed"
        assert result["started"] == {
            "device": None, "uid": [7] * 128, "rank": rank, "nranks": 2, "initializer_method": "uid"
        }  # fmt: skip
        assert result["reach"]["HAS_REMOTE"] == (not reachable)
        assert ("extern_libs" in result["reach"]) == (not reachable)
        assert result["initialised"] == (set() if reachable else {("module", 11)})
        assert result["refusal"] == (
            f"WireUnavailable: NVSHMEM runs with ranks [0, 1] and cannot change them to [{rank}]"
        )


def close_without_the_peer() -> str:
    """Close on rank 0 but not on rank 1. Then rank 1 acts like a restarted rank, and both open."""
    core, process = StandIn((0, 1)), nvshmem._Process()
    memory = nvshmem.NvshmemMemory(dist.group.WORLD, 256, CPU, core, process)
    if dist.get_rank() == 0:
        memory.close()
        memory.close()
    else:
        core, process = StandIn((0, 1)), nvshmem._Process()
    return catch(lambda: nvshmem.NvshmemMemory(dist.group.WORLD, 256, CPU, core, process))


def test_closing_waits_for_nobody_and_a_rank_that_was_started_again_is_refused_everywhere() -> None:
    """NVSHMEM frees collectively and its processes are fixed: survivors hung in the first, newcomers in the second."""
    with RankPool(2, timeout_s=60.0) as pool:
        first, second = pool.run(close_without_the_peer)
    text = (
        "WireUnavailable: NVSHMEM runs with ranks [0, 1] and cannot change them; ranks [1] were started later"
    )
    assert first == second == text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvshmem", None)
    with pytest.raises(
        WireUnavailable, match=r"needs the package nvshmem4py-cu13.*pip install 'wideep\[gpu\]'"
    ):
        nvshmem._load()
