"""Ranks are killed and rejoin while requests run: the tokens stay the same, no request is lost, and nothing leaks."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from expert_placement.config import EplbConfig
from scheduler.assembly import Assembled
from scheduler.epochs import follower, meeting
from scheduler.moves.reports import MoveState, PlacementReport
from scheduler.policy.config import DispatchMode
from scheduler.policy.request import Request
from tests.support.engines.crew import Crew, Doom
from tests.support.engines.moves import targets
from tests.support.engines.serving import build, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint

SOON_S = 30.0  # on a busy machine
WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.1, "seed": 8, "repetition_penalty": 1.2, "num_logprobs": 2},
]


def requests(first: int, count: int, max_tokens: int = 60) -> list[Request]:
    """Return requests of several lengths and sampling parameters, named by number."""
    made = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        length = (3, 40, 17, 90, 26, 1)[number % 6]
        prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        made.append(request(str(number), prompt, max_tokens=max_tokens, **WAYS[number % len(WAYS)]))
    return made


def undisturbed(directory: Path, wanted: list[Request]) -> dict[str, list[int]]:
    """Return the tokens of one rank that serves all requests."""
    return serve(build(directory, max_model_len=320), wanted).token_ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("gpt_oss", directory)  # has biases
    return directory


def check_left(crew: Crew) -> None:
    """Stop in an orderly way: pools are full again, and no group, thread or memory leaks."""
    crew.stop()
    for rank in crew.members:
        left, stats = crew.left[rank], crew.stats[rank]
        assert stats.num_free_blocks == stats.num_blocks and stats.num_running + stats.num_waiting == 0
        assert (left.threads, left.shared_files, left.sockets) == ([], [], 0)


@contextmanager
def serving(
    directory: Path, num_ranks: int, wanted: list[Request], *, at_first: int | None = None, **settings: Any
) -> Iterator[Crew]:
    """Yield a crew with requests, dealt to its ranks in turn (`at_first`: submit only this many at the start).

    At the end, all requests have the tokens of an undisturbed rank, and nothing leaks.
    """
    with Crew(directory, num_ranks, **settings) as crew:
        for rank in range(num_ranks):
            crew.submit(rank, wanted[:at_first][rank::num_ranks])
        yield crew
        crew.until(crew.is_done)
        check_left(crew)
    assert crew.tokens == undisturbed(directory, wanted)


@pytest.mark.slow  # fast tests cover deaths of ranks in test_service
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_rank_dies_amid_a_step_and_comes_back_and_all_requests_have_their_tokens(
    checkpoint: Path, backend: str
) -> None:
    wanted = requests(0, 12)
    with serving(checkpoint, 3, wanted, at_first=9, dooms={1: Doom(12)}, all2all_backend=backend) as crew:
        crew.until(lambda: crew.lost == [1])
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.until(lambda: crew.serve_in(1))
        crew.bring_back(1)
        crew.submit(0, wanted[9:10])
        crew.order([0, 1, 2])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[10:])
    assert set(crew.ends.values()) <= {"length", "stop"}
    assert crew.home is not None
    assert all(crew.left[rank].held_experts == crew.home.local(rank).tolist() for rank in range(3))


@pytest.mark.slow
def test_a_sleeping_rank_is_left_alone_serves_alone_and_is_joined_while_it_serves(checkpoint: Path) -> None:
    wanted = requests(0, 8, max_tokens=40)
    with serving(checkpoint, 2, wanted, at_first=0) as crew:
        crew.kill(1)
        crew.order([0])
        crew.until(lambda: crew.serve_in(1))
        crew.submit(0, wanted[:4])
        crew.bring_back(1)
        crew.submit(0, wanted[4:6])
        crew.order([0, 1])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[6:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gpt_oss", {"all2all_backend": "gloo", "max_num_batched_tokens": 16, "max_num_seqs": 4}),
        ("gpt_oss", {"dispatch_mode": DispatchMode.LOW_LATENCY}),
        ("deepseek_v3", {}),  # has shared experts
        ("qwen2_moe", {}),  # has other sizes
    ],
)
def test_ranks_are_lost_one_by_one_and_come_back(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    """3 -> 2 -> 1 -> 2 -> 3 ranks, always with requests."""
    write_checkpoint(family, tmp_path)
    wanted = requests(0, 18, max_tokens=80)
    with serving(tmp_path, 3, wanted, at_first=9, **settings) as crew:
        crew.until(lambda: all(crew.tokens[request.request_id] for request in wanted[:3]))
        members: tuple[int, ...]
        for members, lost in (((0, 2), 1), ((2,), 0)):
            crew.kill(lost)
            crew.order(members)
            crew.replay(lost, to=2)
            crew.until(lambda: crew.serve_in(crew.epoch))
        for members, back in (((0, 2), 0), ((0, 1, 2), 1)):
            crew.bring_back(back)
            crew.submit(2, wanted[9 + 3 * back : 12 + 3 * back])
            crew.order(members)
            crew.until(lambda: crew.serve_in(crew.epoch))
        crew.submit(1, wanted[15:])


@pytest.mark.slow
def test_rows_travel_flat_while_a_node_is_not_whole(checkpoint: Path) -> None:
    wanted = requests(0, 12)
    settings: dict[str, Any] = {"dispatch_node_size": 2, "all2all_backend": "gloo"}
    with serving(checkpoint, 4, wanted, at_first=8, dooms={2: Doom(8)}, **settings) as crew:
        crew.until(lambda: crew.lost == [2])
        crew.order([0, 1, 3])
        crew.replay(2, to=3)
        crew.bring_back(2)
        crew.until(lambda: crew.serve_in(1))
        crew.order([0, 1, 2, 3])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(2, wanted[8:])


def connect_slowly(_built: Assembled) -> None:
    """Let a rank wait long for members that died while they met."""
    for module in (meeting, follower):
        vars(module)["CONNECT_TIMEOUT_S"] = 2 * SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("function", ["", "meet", "open_groups", "open_channel"])
def test_a_member_that_dies_before_or_while_it_meets_the_others_is_passed_over_by_a_newer_order(
    checkpoint: Path, function: str
) -> None:
    dooms = {2: Doom(function=f"scheduler.epochs.follower.{function}")} if function else {}
    with serving(checkpoint, 3, requests(0, 6), dooms=dooms, prepare=connect_slowly) as crew:
        crew.kill(1)
        crew.order([0, 2], to=None if function else [0])
        if function:
            crew.until(lambda: 2 in crew.lost)
        else:  # rank 0 waits for rank 2 in vain
            crew.kill(2)
        begun_s = time.monotonic()
        crew.order([0])
        crew.until(lambda: crew.serve_in(2))
        assert time.monotonic() - begun_s < SOON_S, "the newer order must end the wait for rank 2"
        for lost in (1, 2):
            crew.replay(lost, to=0)
        crew.until(crew.is_done)
        assert crew.serves == {0: 2}
        assert not any(rank == 0 and fault.epoch == 1 for rank, fault in crew.faults)


@pytest.mark.slow
def test_after_a_meeting_that_failed_a_rank_meets_one_that_never_met(checkpoint: Path) -> None:
    doom = Doom(function="torch.distributed.init_process_group")
    with serving(checkpoint, 3, requests(0, 6), dooms={2: doom}) as crew:
        crew.kill(1)
        crew.order([0, 2])
        crew.until(lambda: any(fault.epoch == 1 for rank, fault in crew.faults if rank == 0))
        crew.bring_back(1)
        crew.until(lambda: crew.ready == {0, 1})
        crew.order([0, 1])
        for lost in (1, 2):
            crew.replay(lost, to=1)


@pytest.mark.slow
def test_a_rank_without_room_for_lost_experts_waits_for_the_rank_to_come_back(checkpoint: Path) -> None:
    with serving(checkpoint, 2, requests(0, 6), without_room=[0]) as crew:
        crew.kill(1)
        crew.order([0])
        crew.until(lambda: any(fault.is_final for _, fault in crew.faults))
        said = next(fault.reason for _, fault in crew.faults if fault.is_final)
        assert "rank 0 would take over 12 experts" in said and "0.0 MiB are available" in said
        crew.bring_back(1)
        crew.order([0, 1])
        crew.replay(1, to=1)


@pytest.mark.slow
def test_all_ranks_die_and_those_that_come_back_serve_from_the_prompts(checkpoint: Path) -> None:
    with serving(checkpoint, 2, requests(0, 6)) as crew:
        crew.until(crew.has_begun)
        for rank in (0, 1):
            crew.kill(rank)
        crew.bring_back(0, 1)
        crew.order([0, 1])
        for rank in (0, 1):
            crew.replay(rank, to=rank)


@pytest.mark.slow
def test_requests_may_be_aborted_and_ranks_asked_to_stop_while_no_epoch_serves(checkpoint: Path) -> None:
    with Crew(checkpoint, 3) as crew:
        crew.submit(0, requests(0, 4, max_tokens=200))
        crew.until(crew.has_begun)
        crew.kill(1)
        crew.until(lambda: {rank for rank, _ in crew.faults} == {0, 2})
        crew.abort("0")
        crew.order([0, 2])
        crew.until(lambda: crew.is_done("0"))
        assert crew.ends["0"] == "abort" or len(crew.tokens["0"]) == 200
        crew.kill(2)
        crew.until(lambda: crew.faults[-1][1].epoch == 1)
        crew.members = (0,)
        crew.stop()
        assert crew.left[0].threads == []


@pytest.mark.slow
def test_a_rank_whose_step_is_stuck_is_found_by_its_heartbeats_and_the_others_go_on(checkpoint: Path) -> None:
    """No collective's timeout is needed: heartbeats show where ranks are, and that one of them waits for another."""
    settings: dict[str, Any] = {"distributed_timeout_s": 500.0, "heartbeat_timeout_s": 0.4}
    wanted = requests(0, 3, max_tokens=220)  # long enough to measure the machine's pace
    with serving(checkpoint, 3, wanted, dooms={1: Doom(is_stuck=True)}, **settings) as crew:
        crew.until(lambda: bool(crew.suspects()), timeout_s=400.0)  # slow steps extend the allowed time
        (suspect,) = crew.suspects()
        assert suspect.rank == 1 and "for it" in suspect.reason, suspect
        assert not crew.faults
        crew.kill(1)
        crew.order([0, 2])
        crew.replay(1, to=0)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_not_waited_for_once_it_is_left_out(checkpoint: Path) -> None:
    """Neither a collective's timeout nor the end of its process is needed: the order leaves it out."""
    with serving(checkpoint, 3, requests(0, 6), all2all_backend="shm", distributed_timeout_s=60.0) as crew:
        crew.until(crew.has_begun)
        os.kill(crew.processes[1].pid, signal.SIGSTOP)
        begun_s = time.monotonic()
        crew.order([0, 2])
        crew.until(lambda: crew.serve_in(1))
        assert time.monotonic() - begun_s < 30.0, "it took more than half of the timeout"
        crew.replay(1, to=0)
        crew.until(crew.is_done)
        crew.kill(1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_a_fault_once_the_time_is_out(checkpoint: Path) -> None:
    with serving(checkpoint, 3, requests(0, 6, max_tokens=100), distributed_timeout_s=3.0) as crew:
        crew.until(crew.has_begun)
        os.kill(crew.processes[1].pid, signal.SIGSTOP)
        crew.until(lambda: {rank for rank, _ in crew.faults} == {0, 2})
        crew.kill(1)
        crew.order([0, 2])
        crew.replay(1, to=0)


@pytest.mark.slow
def test_experts_that_are_on_the_move_when_an_epoch_ends_stay_and_move_in_a_later_one(
    checkpoint: Path,
) -> None:
    wanted = requests(0, 18, max_tokens=120)
    eplb = EplbConfig(num_redundant_experts=10, max_bytes_per_step=1 << 14)
    with serving(checkpoint, 3, wanted, at_first=9, eplb_config=eplb) as crew:
        assert crew.home is not None
        moved, again = targets(crew.home, 2)
        crew.move(moved.with_version(1))
        crew.until(lambda: {report.rank for report in crew.reports if serves(report, 1)} == {0, 1, 2})
        crew.home = moved
        crew.move(again.with_version(2))
        crew.kill(1)
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.bring_back(1)
        crew.order([0, 1, 2])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[9:])
        crew.move(again.with_version(200))
        crew.until(lambda: {report.rank for report in crew.reports if serves(report, 200)} == {0, 1, 2})
    assert all(crew.left[rank].held_experts == again.local(rank).tolist() for rank in range(3))


def serves(report: PlacementReport, version: int) -> bool:
    """Return whether a report confirms the switch to a version."""
    return report.state is MoveState.SERVING and report.version == version
