"""RowExchange: every mover and number of ranks moves rows like the single-process oracle. Bad calls raise on all ranks."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.errors import PeerRefused
from dispatch.gpu.nccl import NcclRows
from dispatch.rows import HostRows, Received, RowExchange, RowMover
from dispatch.wires.local import LocalWire
from dispatch.wires.open import open_wire
from tests.dispatch.exchange import catch
from tests.fixtures import PoolOf

BACKENDS = [("auto", 1), ("shm", 2), ("gloo", 2), ("nccl", 2), ("shm", 4), ("gloo", 4), ("nccl", 4)]
CPU = torch.device("cpu")


def open_mover(name: str) -> RowMover:
    """Open a mover over a wire. The name nccl selects collectives, here of CPU tensors over gloo."""
    if name == "nccl":
        return NcclRows(dist.group.WORLD, device=CPU, timeout_s=20.0)
    return HostRows(open_wire(name, dist.group.WORLD, timeout_s=20.0), CPU)


class Case(NamedTuple):
    """Data that one rank sends."""

    planes: list[Tensor]
    is_token_in_rank_TR: Tensor


class Seen(NamedTuple):
    """Results of one rank from send, resend with other planes, and give_back."""

    received: Received
    again: list[Tensor]
    back: list[Tensor]
    token_Q: Tensor
    rank_Q: Tensor


def make_planes(generator: torch.Generator, T: int) -> list[Tensor]:
    """Return tensors of many dtypes and shapes, including float8, bool, no columns, and one dimension."""
    values = torch.randn(T, 9, generator=generator)
    return [
        values.bfloat16(),
        values[:, :5].to(torch.float8_e4m3fn),
        values[:, :3].double().T.contiguous().T,  # column-major
        torch.randint(-(1 << 40), 1 << 40, (T, 2, 2), generator=generator),
        values > 0,
        values[:, 0].contiguous(),
        values[:, :0].contiguous(),
    ]


def make_cases(seed: int, tokens: list[int], density: float = 0.4) -> list[Case]:
    generator = torch.Generator().manual_seed(seed)
    R = len(tokens)
    return [Case(make_planes(generator, T), torch.rand(T, R, generator=generator) < density) for T in tokens]


def aim(cases: list[Case], rank: int, wanted: bool) -> list[Case]:
    """Send every token, or none, to `rank`."""
    for case in cases:
        case.is_token_in_rank_TR[:, rank] = wanted
    return cases


def edge_cases(R: int) -> list[list[Case]]:
    uneven = [(5 * rank + 3) % 7 for rank in range(R)]
    return [
        make_cases(1, uneven),
        make_cases(2, [0] * R),  # no rank has tokens
        make_cases(3, [6] + [0] * (R - 1)),  # one rank has all tokens
        make_cases(4, uneven, density=0.0),  # no token is sent
        make_cases(5, uneven, density=1.1),  # every token goes to every rank
        aim(make_cases(6, uneven), 0, wanted=False),  # no token goes to rank 0
        aim(make_cases(7, uneven, density=0.0), R - 1, wanted=True),  # all tokens go to the last rank
        make_cases(8, [300] * R),  # larger than before
    ]


def answers(planes: list[Tensor], rank: int) -> list[Tensor]:
    """Compute a rank's answers to its rows."""
    return [planes[0].float() * (rank + 1), planes[3]]


def run_cases(name: str) -> list[Seen]:
    mover = open_mover(name)
    exchange, seen = RowExchange(mover), []
    for cases in edge_cases(mover.world_size):
        case = cases[mover.rank]
        received = exchange.send(case.planes, case.is_token_in_rank_TR, note=[mover.rank, -7])
        again = exchange.resend([case.planes[0].float() + 1], received.route)
        back = exchange.give_back(answers(received.planes, mover.rank), received.route)
        for ours, sent in zip(received.planes, case.planes, strict=True):
            assert ours.dtype == sent.dtype
            assert ours.shape == (received.source_token_N.shape[0], *sent.shape[1:])
        as_sent = received._replace(
            planes=[as_bytes(plane) for plane in received.planes]
        )  # float8 cannot be pickled
        seen.append(Seen(as_sent, again, *back))
    mover.close()
    return seen


def expect(cases: list[Case], rank: int) -> Seen:
    """Run all ranks in one process, with rows concatenated by rank. The oracle."""
    R = len(cases)
    tokens = [[case.is_token_in_rank_TR[:, to].nonzero().squeeze(1) for to in range(R)] for case in cases]

    def arrived(to: int, planes_of: list[list[Tensor]]) -> list[Tensor]:
        parts = [[plane[tokens[s][to]] for plane in planes] for s, planes in enumerate(planes_of)]
        return [torch.cat([as_bytes(p) for p in column]) for column in zip(*parts, strict=True)]

    counts_RR = torch.tensor([[t.numel() for t in row] for row in tokens])
    source_N = torch.cat([tokens[s][rank] for s in range(R)]).int()
    received = Received(
        arrived(rank, [case.planes for case in cases]), source_N, counts_RR[:, rank].tolist(),
        (cases[rank].is_token_in_rank_TR, counts_RR), [[s, -7] for s in range(R)],
    )  # fmt: skip
    back = [
        answers([plane[tokens[rank][to]] for plane in cases[rank].planes], to) for to in range(R)
    ]  # this rank's tokens as answered by rank `to`
    return Seen(
        received,
        arrived(rank, [[case.planes[0].float() + 1] for case in cases]),
        [torch.cat([as_bytes(p) for p in column]) for column in zip(*back, strict=True)],
        torch.cat(tokens[rank]),
        torch.arange(R).repeat_interleave(counts_RR[rank]),
    )


def as_bytes(plane: Tensor) -> Tensor:
    return plane.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same(ours: list[Tensor], oracle: list[Tensor]) -> None:
    assert len(ours) == len(oracle)
    for got, want in zip(ours, oracle, strict=True):
        assert torch.equal(as_bytes(got), want)


@pytest.mark.crossed("name", "world_size", every=2)
@pytest.mark.parametrize(("name", "world_size"), BACKENDS)
def test_rows_go_where_the_oracle_sends_them(pool_of: PoolOf, name: str, world_size: int) -> None:
    layers = edge_cases(world_size)
    results = pool_of(world_size).run(run_cases, name)
    for index, cases in enumerate(layers):
        for rank in range(world_size):
            got, want = results[rank][index], expect(cases, rank)
            assert_same(got.received.planes, want.received.planes)
            assert torch.equal(got.received.source_token_N, want.received.source_token_N)
            assert got.received.counts_R == want.received.counts_R
            assert torch.equal(got.received.route.counts_RR, want.received.route[1])
            assert got.received.notes == want.received.notes
            assert_same(got.again, want.again)
            assert_same(got.back, want.back)
            assert torch.equal(got.token_Q, want.token_Q)
            assert torch.equal(got.rank_Q, want.rank_Q)


def bad_calls(name: str) -> list[str]:
    """Make calls on which ranks disagree, each followed by one on which they agree. Return the errors."""
    mover = open_mover(name)
    exchange, rank, R = RowExchange(mover), mover.rank, mover.world_size
    everywhere = torch.ones(2, R, dtype=torch.bool)
    good = exchange.send([torch.ones(2, 4)], everywhere)
    other = exchange.send([torch.ones(2 + rank, 4)], torch.ones(2 + rank, R, dtype=torch.bool))
    is_odd = rank == R - 1
    calls = [
        lambda: exchange.send([torch.ones(2, 8 if is_odd else 4)], everywhere),
        lambda: exchange.send([torch.ones(2, 4, dtype=torch.float64 if is_odd else None)], everywhere),
        lambda: exchange.send([torch.ones(2, 4)] * (2 if is_odd else 1), everywhere),
        lambda: exchange.send([torch.ones(2, 4)], everywhere, call="dispatch" if is_odd else "combine"),
        lambda: (
            exchange.give_back([torch.ones(2 * R, 4)], good.route)
            if is_odd
            else exchange.send([torch.ones(2, 4)], everywhere)
        ),
        lambda: (
            exchange.resend([torch.ones(2 + rank, 4)], other.route)
            if is_odd
            else exchange.resend([torch.ones(2, 4)], good.route)
        ),
        lambda: exchange.refuse("x is bad") if is_odd else exchange.send([torch.ones(2, 4)], everywhere),
    ]
    raised = []
    for call in calls:
        raised.append(catch(call))
        back = exchange.give_back([torch.full((2 * R, 3), float(rank))], good.route)
        assert torch.equal(back.planes[0][:, 0], torch.arange(R).repeat_interleave(2).float())
    mover.close()
    return raised


@pytest.mark.parametrize(("name", "world_size"), BACKENDS[1:])
def test_ranks_that_disagree_all_hear_it_and_go_on(pool_of: PoolOf, name: str, world_size: int) -> None:
    raised = pool_of(world_size).run(bad_calls, name)
    odd = world_size - 1
    for rank in range(world_size):
        *disagreements, refused = raised[rank]
        for text in disagreements:
            other = 0 if rank == odd else odd
            assert f"rank {other} made another call than rank {rank}" in text and "RanksDisagree: " in text, (
                text
            )
        if rank == odd:
            assert refused == "ValueError: x is bad"
        else:
            assert refused == f"{PeerRefused.__name__}: rank {odd} refused the call: x is bad"
    if name != "nccl":
        assert raised[0][0].startswith("RanksDisagree: rank 0 called 'send: float32 [4]; int32 []'; rank ")


def test_a_masked_rank_is_an_error(pool_of: PoolOf) -> None:
    for text in pool_of(2).run(send_with_a_masked_peer):
        assert "is masked, and this exchange needs every rank" in text


def send_with_a_masked_peer() -> str:
    wire = open_wire("shm", dist.group.WORLD, timeout_s=20.0, mask_lost=True)
    wire.mask.values[1 - wire.rank] = 1
    exchange = RowExchange(HostRows(wire, CPU))
    said = catch(lambda: exchange.send([torch.ones(1, 4)], torch.ones(1, 2, dtype=torch.bool)))
    wire.close()
    return said


def test_received_planes_are_new_memory() -> None:
    exchange = RowExchange(HostRows(LocalWire(), CPU))
    x = torch.ones(2, 4)
    received = exchange.send([x], torch.ones(2, 1, dtype=torch.bool))
    received.planes[0].zero_()
    assert torch.equal(x, torch.ones(2, 4))
