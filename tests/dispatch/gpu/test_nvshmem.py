"""Memory of NVSHMEM, with a stand-in for its Python package over a process's own memory: nothing here ran on a GPU."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dispatch.errors import WireUnavailable
from tests.support.ranks import RankPool

pytest.importorskip("triton", reason="needs triton: pip install -r requirements-dev.txt")
from dispatch.gpu import nvshmem_symmetric

CPU = torch.device("cpu")
PEER_AT = 0x7000_0000_0000


class StandIn:
    """What the provider calls of nvshmem.core, with its names; `reachable` are the peers that have an address."""

    class NvshmemError(Exception):
        """As NVSHMEM4Py's."""

    NvshmemKernelObject = SimpleNamespace(from_handle=lambda handle: ("module", handle))

    def __init__(self, reachable: tuple[int, ...]) -> None:
        self.reachable = reachable
        self.freed: list[Any] = []
        self.initialised: list[Any] = []
        self.started: dict[str, Any] = {}

    def get_unique_id(self, empty: bool = False) -> Any:
        return SimpleNamespace(_data=np.full(128, 0 if empty else 7, dtype=np.int8))

    def init(self, **arguments: Any) -> None:
        self.started = {**arguments, "uid": arguments["uid"]._data.tolist()}

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), 1, dtype=torch.int8)

    def get_peer_buffer(self, buffer: torch.Tensor, peer: int) -> Any:
        if peer not in self.reachable:
            raise self.NvshmemError("Failed to retrieve peer buffer")
        return SimpleNamespace(handle=PEER_AT + peer)

    def module_init(self, module: Any) -> None:
        self.initialised.append(module)

    def free(self, buffer: torch.Tensor) -> None:
        self.freed.append(buffer)


def open_twice(reachable: tuple[int, ...]) -> dict[str, Any]:
    """Open, grow (close and open larger), and then ask for other ranks."""
    core = StandIn(reachable)
    nvshmem_symmetric._started.clear()
    nvshmem_symmetric.find_device_library = lambda: "libnvshmem_device.bc"  # type: ignore[assignment]
    memory = nvshmem_symmetric.NvshmemMemory(dist.group.WORLD, 256, CPU, core)
    memory.close()
    larger = nvshmem_symmetric.NvshmemMemory(dist.group.WORLD, 512, CPU, core)
    from triton import knobs  # noqa: PLC0415 - ranks decide first whether to interpret

    knobs.runtime.kernel_load_end_hook(11, 0, "send_rows", {}, "")
    knobs.runtime.kernel_load_end_hook(12, 0, "place_rows", {}, "")
    alone = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    try:
        nvshmem_symmetric.NvshmemMemory(alone[dist.get_rank()], 256, CPU, core)
        refusal = ""
    except WireUnavailable as error:
        refusal = str(error)
    return {
        "started": core.started,
        "peers": larger.peers.tolist(),
        "own": larger.base,
        "sizes": (len(core.freed), larger.memory.numel(), int(larger.memory.max())),
        "reach": larger.reach,
        "initialised": set(core.initialised),
        "refusal": refusal,
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
        assert result["peers"] == [addresses[0], addresses[1]]
        assert result["sizes"] == (1, 512, 0)
        assert result["started"] == {
            "device": None, "uid": [7] * 128, "rank": rank, "nranks": 2, "initializer_method": "uid"
        }  # fmt: skip
        assert result["reach"]["HAS_REMOTE"] == (not reachable)
        assert ("extern_libs" in result["reach"]) == (not reachable)
        assert result["initialised"] == (set() if reachable else {("module", 11)})
        assert result["refusal"].startswith("NVSHMEM runs in this process with ranks [0, 1], and cannot run")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nvshmem", None)
    with pytest.raises(
        WireUnavailable, match=r"needs the package nvshmem4py-cu13.*pip install 'wideep\[gpu\]'"
    ):
        nvshmem_symmetric._load()
