"""Experts move while requests are served: bits stay equal, placements are complete, and only verified experts serve."""

import os
import queue
import signal
import threading
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dispatch.errors import DispatchError
from expert_placement.placement import linear_placement
from moe.expert_weights import ExpertWeights, digest, read_slot, try_out
from scheduler.assembly import Assembled
from scheduler.moves import expert_transfer, relocation
from scheduler.moves.channel import NoPeers, Pace
from scheduler.moves.expert_transfer import MovableLayer
from scheduler.moves.reports import Cause, MoveState, PlacementReport
from scheduler.policy.request import Request
from tests.fixtures import PoolOf
from tests.support.engines.moves import Intercepted, MovedRank, Moves, build_with_copies, targets
from tests.support.engines.serving import build, own_share, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankDied

FAMILIES = ("gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.slow))  # the first has biases
SERVING, FAILED, VERIFIED, DROPPED = (
    MoveState.SERVING, MoveState.FAILED, MoveState.VERIFIED, MoveState.DROPPED,
)  # fmt: skip


def requests(count: int = 8) -> list[Request]:
    generator = torch.Generator().manual_seed(4)
    lengths = (3, 40, 17, 9, 26, 1, 33, 12)[:count]
    prompts = [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
    return [
        request(str(index), prompt, max_tokens=40, num_logprobs=0) for index, prompt in enumerate(prompts)
    ]


Answers = dict[str, list[tuple[int, float]]]


def answers(moved: MovedRank) -> Answers:
    found: Answers = {}
    for output in moved.served.outputs:
        found.setdefault(output.request_id, []).extend((e.token_id, e.logprob) for e in output.logprobs)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


class Held(NamedTuple):
    """Checksums of a rank's slots, and the experts that its placement gives them; -1: none."""

    slots: list[list[bytes]]
    experts: list[list[int]]


def held_by(built: Assembled) -> Held:
    """Return what the slots of this rank hold."""
    rank = torch.distributed.get_rank()
    return Held(slot_digests(built), built.relocation.placement.local(rank).tolist())


def slot_digests(built: Any) -> list[list[bytes]]:
    """Return the checksums of all slots of this rank."""
    return [
        [digest(read_slot(layer, slot).tensors()) for slot in range(layer.up.num_slots)]
        for layer in built.model.layers
    ]


class Alone(NamedTuple):
    """What one rank with all experts answers."""

    answers: Answers
    experts: list[list[bytes]]  # checksums of each layer's experts

    def has_changed(self, held: Held) -> bool:
        """Return whether a slot does not hold the bytes of its expert."""
        return any(
            slot != self.experts[layer][expert]
            for layer, (slots, experts) in enumerate(zip(held.slots, held.experts, strict=True))
            for slot, expert in zip(slots, experts, strict=True)
            if expert >= 0
        )


def serve_alone(directory: Path, **settings: Any) -> Alone:
    """Serve all requests on one rank. Its slots hold the experts in order."""
    built = build(directory, max_model_len=160, **settings)
    return Alone(answers(MovedRank(serve(built, requests()))), slot_digests(built))


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Alone:
    """Return what one rank answers."""
    return serve_alone(checkpoint)


def twice(once: Answers) -> Answers:
    """Return the answers to two waves of the same requests."""
    return {name: rows * 2 for name, rows in once.items()}


def moving(directory: Path, count: int, settings: dict[str, Any]) -> tuple[MovedRank, Held]:
    """Serve two waves of requests while moving through placements. Return also what the slots hold at the end."""
    built = build_with_copies(directory, 6, **settings)
    wanted = targets(built.relocation.placement, count)
    moved = Moves(built, wanted).serve(own_share(requests()), own_share(requests()))
    return moved, held_by(built)


@pytest.mark.parametrize(
    ("world_size", "backend"), [(2, "shm"), pytest.param(4, "gloo", marks=pytest.mark.slow)]
)
def test_answers_keep_their_bits_while_experts_move_again_and_again(
    checkpoint: Path, alone: Alone, world_size: int, backend: str, pool_of: PoolOf
) -> None:
    parts = pool_of(world_size).run(moving, checkpoint, 4, {"all2all_backend": backend})
    assert {key: rows for moved, _ in parts for key, rows in answers(moved).items()} == twice(alone.answers)
    for moved, held in parts:
        assert not alone.has_changed(held), "a slot does not hold its expert's bytes"
        assert moved.states() == [(v, state) for v in (1, 2, 3, 4) for state in (VERIFIED, SERVING)]
    assert len({moved.digest for moved, _ in parts}) == 1
    switched = [[r.step for r in moved.reports if r.state is SERVING] for moved, _ in parts]
    assert all(steps == switched[0] for steps in switched), "ranks switched at different steps"
    assert sum(report.num_bytes for moved, _ in parts for report in moved.reports) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_thirty_rebalances_under_load_change_no_token_and_lose_no_request(
    checkpoint: Path, alone: Alone, world_size: int, pool_of: PoolOf
) -> None:
    parts = pool_of(world_size).run(moving, checkpoint, 30, {"max_bytes_per_step": 1 << 14})
    assert {key: rows for moved, _ in parts for key, rows in answers(moved).items()} == twice(alone.answers)
    for moved, held in parts:
        assert not alone.has_changed(held) and moved.states()[-1] == (30, SERVING)
        ended = [output for output in moved.served.outputs if output.finish_reason is not None]
        assert len(ended) == 2 * len(own_ids(moved)) and not any(output.error for output in ended)


def own_ids(moved: MovedRank) -> set[str]:
    """Return the requests that a rank served."""
    return {output.request_id for output in moved.served.outputs}


def flipping_second(data: torch.Tensor, sent: list[int]) -> torch.Tensor:
    """Flip one bit of the second message of more than 2 KiB."""
    if len(data) > 2048:
        sent.append(len(data))
        if len(sent) == 2:
            data = data.clone()
            data[len(data) // 2] ^= 4
    return data


def spoil(built: Any, how: str, patch: pytest.MonkeyPatch) -> None:
    """Corrupt one message of rank 0."""
    if torch.distributed.get_rank() != 0:
        return
    if how == "flipped bit":
        sending = partial(flipping_second, sent=[])
        built.relocation._channel = Intercepted(built.relocation._channel, sending=sending)
        return
    true_send, true_read, true_try = expert_transfer.send_expert, read_slot, try_out
    true_tensors = ExpertWeights.tensors

    def lacking(weights: ExpertWeights) -> dict[str, torch.Tensor]:
        tensors = true_tensors(weights)
        tensors.pop("up_bias" if "up_bias" in tensors else "down")
        return tensors

    def send(place: MovableLayer, slot: int, *rest: Any) -> int:
        with pytest.MonkeyPatch.context() as brief:
            if how == "missing tensor":
                brief.setattr(ExpertWeights, "tensors", lacking)
            else:  # correct bytes with a correct checksum, but of another expert
                tried = true_read(place.layer, slot)
                brief.setattr(
                    expert_transfer, "read_slot", lambda layer, _slot: true_read(layer, (slot + 1) % 6)
                )
                brief.setattr(
                    expert_transfer, "try_out", lambda layer, module, _w, x: true_try(layer, module, tried, x)
                )
            return true_send(place, slot, *rest)

    patch.setattr(relocation, "send_expert", send)


def failing(directory: Path, how: str) -> tuple[MovedRank, bool, str]:
    """Serve while a first move is corrupted and a second one is not."""
    built = build_with_copies(directory, 6)
    before, start = slot_digests(built), built.relocation.placement
    spoilt, sound = targets(start, 1)[0], targets(start, 2)[1]
    with pytest.MonkeyPatch.context() as patch:
        spoil(built, how, patch)
        moves = Moves(built, [spoilt], doomed=[1])
        moved = moves.serve(own_share(requests()))
        moves.wait_for_end(1)  # an idle rank ends serving on all ranks
    unchanged = slot_digests(built) == before and moved.digest == start.digest()
    built.relocation._channel = getattr(built.relocation._channel, "channel", built.relocation._channel)
    reason = next((r.reason for r in moved.reports if r.state is FAILED), "")
    built.engine._is_stopping = False
    again = Moves(built, [sound.with_version(2)]).serve(own_share(requests()))
    assert again.states() == [(2, VERIFIED), (2, SERVING)], again.reports
    moved.served.outputs += again.served.outputs
    return moved, unchanged, reason


@pytest.mark.parametrize(
    ("how", "said", "cause"),
    [
        ("flipped bit", "a checksum that differs from the source's", Cause.CHECK_SUM),
        pytest.param("missing tensor", "it must be {", Cause.MANIFEST, marks=pytest.mark.slow),
        pytest.param("wrong expert", "has other outputs for 8 rows", Cause.ANSWER, marks=pytest.mark.slow),
    ],
)
def test_what_does_not_arrive_as_it_was_never_serves_and_serving_goes_on(
    checkpoint: Path, alone: Alone, how: str, said: str, cause: Cause, pool_of: PoolOf
) -> None:
    parts = pool_of(2).run(failing, checkpoint, how)
    found = {key: rows for moved, _, _ in parts for key, rows in answers(moved).items()}
    assert found == twice(alone.answers)
    assert all(unchanged for _, unchanged, _ in parts), "slots or placement differ from those before the move"
    assert parts[0][0].states() == [(1, VERIFIED), (1, DROPPED)]
    assert parts[1][0].states() == [(1, FAILED)]
    assert parts[1][0].reports[0].cause is cause
    assert said in parts[1][2]


def buggy(directory: Path) -> tuple[MovedRank, bool]:
    """Serve while a bug in rank 0's mover ends a first move during a transfer. Then try a second move."""
    built = build_with_copies(directory, 6)
    before, start = slot_digests(built), built.relocation.placement
    true_read = read_slot

    def broken(layer: Any, slot: int) -> ExpertWeights:
        if torch.distributed.get_rank() == 0:
            raise KeyError("a bug")
        return true_read(layer, slot)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_transfer, "read_slot", broken)
        moved = Moves(built, targets(start, 2)).serve(own_share(requests()))
    return moved, slot_digests(built) == before and moved.digest == start.digest()


def test_a_bug_amid_a_transfer_drops_the_change_on_all_ranks_and_serving_goes_on(
    checkpoint: Path, alone: Alone, pool_of: PoolOf
) -> None:
    parts = pool_of(2).run(buggy, checkpoint)
    assert {key: rows for moved, _ in parts for key, rows in answers(moved).items()} == alone.answers
    assert all(unchanged for _, unchanged in parts)
    for moved, _ in parts:
        assert moved.states() == [(1, FAILED), (2, FAILED)]
        assert (
            moved.reports[1].cause is Cause.CHANNEL
            and "no expert moves any more until ranks meet in another epoch" in moved.reports[1].reason
        )
    assert parts[0][0].reports[0].cause is Cause.BUG and "KeyError: 'a bug'" in parts[0][0].reports[0].reason
    assert parts[1][0].reports[0].cause is Cause.CHANNEL


def tripping() -> list[tuple[int, MoveState, Cause, str]]:
    """Let the mover fail after all transfers, when no rank waits. Later changes must work."""
    start, reports = linear_placement(1, 4, 1), queue.Queue[PlacementReport]()
    alone = relocation.Relocation(0, start, [], NoPeers(), Pace(1 << 20))
    alone.on_report = reports.put
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relocation, "slot_choices", lambda *_: [][1])
        alone.prepare(start.with_version(1))
        told = [reports.get(timeout=30)]
    alone.prepare(start.with_version(2))
    told.append(reports.get(timeout=30))
    assert alone.version_to_post() == 2
    return [(report.version, report.state, report.cause, report.reason) for report in told]


def test_a_change_that_comes_between_two_epochs_ends_with_the_next_one() -> None:
    start, reports = linear_placement(1, 4, 1), queue.Queue[PlacementReport]()
    alone = relocation.Relocation(0, start, [], NoPeers(), Pace(1 << 20))
    alone.on_report = reports.put
    alone.end_epoch()
    alone.prepare(start.with_version(1))
    reports.get(timeout=30)
    assert alone.is_moving
    alone.begin_epoch(0, start.with_version(2), NoPeers())
    assert not alone.is_moving and alone.version_to_post() == 2
    alone.prepare(start.with_version(3))
    assert reports.get(timeout=30).state is VERIFIED and alone.version_to_post() == 3


def test_the_thread_that_moves_is_made_ready_before_it_moves_anything() -> None:
    """On a GPU, kernels are launched on the current device of the thread, which is the first one by default."""
    start, seen = linear_placement(1, 4, 1), queue.Queue[str]()
    alone = relocation.Relocation(
        0, start, [], NoPeers(), Pace(1 << 20), enter_thread=lambda: seen.put(threading.current_thread().name)
    )
    alone.on_report = lambda report: seen.put(report.state.name)
    alone.prepare(start.with_version(1))
    assert [seen.get(timeout=30) for _ in range(2)] == ["expert-mover", "VERIFIED"]


@pytest.mark.usefixtures("checkpoint")  # in order, before a test ends the pool
def test_a_bug_beside_transfers_leaves_the_channel_as_it_is(pool_of: PoolOf) -> None:
    for first, second in pool_of(2).run(tripping):
        assert first[:3] == (1, FAILED, Cause.BUG) and "IndexError" in first[3]
        assert second[:3] == (2, VERIFIED, Cause.NONE)


def dying(directory: Path) -> tuple[str, bool, list[tuple[int, MoveState]]]:
    """Serve and start a move in which rank 1 dies. The survivor reports the state of its slots and placement."""
    built = build_with_copies(directory, 6, distributed_timeout_s=5.0)
    before, start = slot_digests(built), built.relocation.placement
    received = count(1)

    def die_at_the_ninth() -> None:
        if next(received) == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    if torch.distributed.get_rank() == 1:
        built.relocation._channel = Intercepted(built.relocation._channel, receiving=die_at_the_ninth)
    moves = Moves(built, targets(start, 1))
    try:
        moves.serve(own_share(requests()))
    except DispatchError as error:
        unchanged = slot_digests(built) == before and built.relocation.placement is start
        moves.wait_for_end(1)
        return type(error).__name__, unchanged, moves.moved.states()
    return "nothing happened", False, moves.moved.states()


def test_a_rank_that_dies_in_the_middle_of_a_move_leaves_no_half_placement(
    checkpoint: Path, pool_of: PoolOf
) -> None:
    pool = pool_of(2)
    pool.start(dying, checkpoint)
    (error, unchanged, states), died = pool.collect(may_die=[1], timeout_s=60.0)
    assert isinstance(died, RankDied)
    assert error in ("PeerLost", "DispatchTimeout") and unchanged
    assert states == [(1, FAILED)]
