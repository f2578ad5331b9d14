"""Every backend and number of ranks yields the bits of the single-process oracle."""

import pytest
import torch
import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.wires import segment
from dispatch.wires.gloo import INCOMING_BYTES, MAX_PART_BYTES, fitting_part_bytes
from dispatch.wires.open import open_wire
from dispatch.wires.shm import MAX_REGION_BYTES, SEGMENT_BYTES, fitting_region_bytes
from tests.dispatch.exchange import check_bits, run_layers
from tests.dispatch.oracle import RankCase, make_cases
from tests.fixtures import PoolOf

S = 4
BACKENDS = [(name, world_size) for world_size in (2, 4, 8) for name in ("shm", "gloo")]


def edge_layers(R: int) -> list[list[RankCase]]:
    """Return layers that cover all relevant differences, with edge cases."""
    uneven = [(5 * rank + 3) % 9 for rank in range(R)]
    return [
        make_cases(1, uneven),
        make_cases(2, [0] * R),  # no rank has tokens
        make_cases(3, [7] + [0] * (R - 1)),  # one rank has all tokens
        make_cases(4, uneven, no_choice=1.0),  # padded rows only
        make_cases(5, [6] * R, only_slot=R * S - 1, no_choice=0.0),  # all tokens to one slot, repeated
        make_cases(6, uneven, choices=R + 3, no_choice=0.0),  # more choices than ranks
        make_cases(7, uneven, choices=1, hidden=33),
        make_cases(8, uneven, dtype=torch.bfloat16, hidden=7),
        make_cases(9, uneven, dtype=torch.float16),
        make_cases(10, uneven, dtype=torch.float64),
        make_cases(11, [40] * R, hidden=256),  # the largest so far: buffers grow during use
        *[make_cases(seed, [(seed + rank) % 5 for rank in range(R)]) for seed in range(12, 20)],
    ]


def check(pool_of: PoolOf, name: str, layers: list[list[RankCase]], region_bytes: int | None = None) -> None:
    results = pool_of(len(layers[0])).run(run_layers, name, layers, S, region_bytes)
    check_bits(results, layers, S)


@pytest.mark.crossed("name", "world_size", every=2)
@pytest.mark.parametrize(("name", "world_size"), BACKENDS)
def test_all_backends_give_the_oracles_bits(pool_of: PoolOf, name: str, world_size: int) -> None:
    check(pool_of, name, edge_layers(world_size))


@pytest.mark.parametrize(("name", "world_size"), BACKENDS[:4])
def test_large_messages_give_the_oracles_bits(pool_of: PoolOf, name: str, world_size: int) -> None:
    """Messages of up to 40 KB through regions of 1 KB: some pairs need many rounds, some one, some none."""
    layers = [
        make_cases(1, [40] * world_size, hidden=256),
        make_cases(2, [0] * (world_size - 1) + [60], hidden=256),
        make_cases(3, [1] * world_size),
        make_cases(4, [30] + [1] * (world_size - 1), hidden=256, no_choice=0.7),
        make_cases(5, [9] * world_size, only_slot=0, hidden=256),
        make_cases(6, [2] * world_size, hidden=16),
    ]
    check(pool_of, name, layers, region_bytes=1024)


def open_and_describe(name: str) -> tuple[str, str, int]:
    wire = open_wire(name, dist.group.WORLD, epoch=3)
    wire.close()
    wire.close()
    return wire.name, wire.reason, wire.epoch


def test_auto_takes_shared_memory_on_one_host(pool_of: PoolOf) -> None:
    reason = "all ranks are on one host and map the same memory"
    assert pool_of(2).run(open_and_describe, "auto") == [("shm", reason, 3)] * 2


def open_on_two_hosts(name: str) -> tuple[str, str]:
    """Give rank 1 another host name, as if it ran elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr("dispatch.wires.segment.socket.gethostname", lambda: "elsewhere")
        try:
            wire = open_wire(name, dist.group.WORLD)
        except WireUnavailable as error:
            return "refused", str(error)
    return wire.name, wire.reason


@pytest.mark.parametrize(("asked", "taken"), [("auto", "gloo"), ("shm", "refused")])
def test_between_hosts_auto_takes_gloo_and_shm_is_refused_on_every_rank(
    pool_of: PoolOf, asked: str, taken: str
) -> None:
    for name, reason in pool_of(2).run(open_on_two_hosts, asked):
        assert name == taken and "ranks [1] are not on the host of rank 0" in reason


def open_with_little_memory(name: str) -> str:
    """Pretend that little memory is left. Do not allocate much instead: it would affect the whole machine."""
    true_available = segment.available_bytes
    segment.available_bytes = lambda: 1 << 20
    try:
        return open_wire(name, dist.group.WORLD).reason
    except WireUnavailable as error:
        return f"refused: {error}"
    finally:
        segment.available_bytes = true_available


@pytest.mark.parametrize(("asked", "is_refused"), [("auto", False), ("shm", True)])
def test_too_little_memory_is_refused_with_the_sizes_or_left_to_gloo(
    pool_of: PoolOf, asked: str, is_refused: bool
) -> None:
    for message in pool_of(2).run(open_with_little_memory, asked):
        assert message.startswith("refused: ") == is_refused
        assert "bytes are needed, more than half of the 1048576 that are available" in message


def test_an_unknown_wire_is_refused() -> None:
    with pytest.raises(ValueError, match="'pigeon'; it must be one of auto, local, gloo, shm, nccl"):
        open_wire("pigeon", None)


@pytest.mark.parametrize(("region_bytes", "least"), [(1000, 1024), (960, 1024), (0, 1024)])
def test_a_bad_region_is_refused(region_bytes: int, least: int) -> None:
    with pytest.raises(
        ValueError, match=f"is {region_bytes}; it must be a multiple of 64 and at least {least}"
    ):
        open_wire("gloo", None, region_bytes=region_bytes)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_bad_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="it must be above 0 seconds"):
        open_wire("auto", None, timeout_s=timeout_s)


def test_parts_stay_within_their_address_space() -> None:
    assert fitting_part_bytes(2) == MAX_PART_BYTES
    for world_size in (4, 16, 17, 33):
        part = fitting_part_bytes(world_size)
        assert part % 64 == 0
        assert (world_size - 1) * part <= INCOMING_BYTES


def test_regions_stay_within_the_segment() -> None:
    assert fitting_region_bytes(2) == MAX_REGION_BYTES
    for world_size in (4, 8, 16):
        region = fitting_region_bytes(world_size)
        assert region % 64 == 0
        assert 2 * world_size * (world_size - 1) * region <= SEGMENT_BYTES
