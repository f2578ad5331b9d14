"""Ranks are killed and come back while requests run: the same tokens, no request lost, nothing left behind."""

from pathlib import Path
from typing import Any

import pytest
import torch

from scheduler.request import Request
from tests.support.crew import Crew, Doom
from tests.support.families import VOCABULARY, write_checkpoint
from tests.support.serving import build, request, serve

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 7, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.1, "seed": 8, "repetition_penalty": 1.2, "num_logprobs": 2},
]


def requests(first: int, count: int, max_tokens: int = 60) -> list[Request]:
    """Requests of all lengths and ways to sample, named by their numbers."""
    made = []
    for number in range(first, first + count):
        generator = torch.Generator().manual_seed(number)
        length = (3, 40, 17, 90, 26, 1)[number % 6]
        prompt = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        made.append(request(str(number), prompt, max_tokens=max_tokens, **WAYS[number % len(WAYS)]))
    return made


def undisturbed(directory: Path, wanted: list[Request]) -> dict[str, list[int]]:
    """The tokens of one rank that serves them all."""
    return serve(build(directory, max_model_len=320), wanted).token_ids


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint("gpt_oss", directory)  # with biases
    return directory


def check_left(crew: Crew) -> None:
    """Stop in order: pools are full again, and no group, thread or memory is left."""
    crew.stop()
    for rank in crew.members:
        left, stats = crew.left[rank], crew.stats[rank]
        assert stats.num_free_blocks == stats.num_blocks and stats.num_running + stats.num_waiting == 0
        assert (left.threads, left.shared_files, left.sockets) == ([], [], 0)


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_dies_amid_a_step_and_comes_back_and_all_requests_have_their_tokens(
    checkpoint: Path, backend: str
) -> None:
    wanted = requests(0, 12)
    with Crew(checkpoint, 3, dooms={1: Doom(12)}, all2all_backend=backend) as crew:
        for rank in range(3):
            crew.submit(rank, wanted[:9][rank::3])
        crew.until(lambda: crew.lost == [1])
        crew.order([0, 2])
        crew.replay(1, to=2)
        crew.until(lambda: crew.serve_in(1))
        crew.start(1, is_joining=True)
        crew.until(lambda: 1 in crew.ready)
        crew.submit(0, wanted[9:10])
        crew.order([0, 1, 2])
        crew.until(lambda: crew.serve_in(2))
        crew.submit(1, wanted[10:])
        crew.until(crew.is_done)
        check_left(crew)
    assert crew.tokens == undisturbed(checkpoint, wanted)
    assert set(crew.ends.values()) <= {"length", "stop"}
    assert crew.home is not None
    assert all(crew.left[rank].held_experts == crew.home.local(rank).tolist() for rank in range(3))
