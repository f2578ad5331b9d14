"""Hundreds of concurrent streams, a third of them left and a tenth read slowly: all other answers are right, and finally
neither front nor ranks hold anything."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.serving.paced_rank import NUM_BLOCKS
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.requests.streams import Manner, Streamed, run
from tests.support.service.paced_front import PacedFront
from tests.support.service.process_figures import num_descriptors, rss_bytes
from tests.support.service.service_processes import wait_until

STEP_S = 0.005
SHORT_REPEATS, LONG_REPEATS = 3, 30  # of the prompt in the answer
SLOW_CHOICES = 4  # enough that a slow reader's answer exceeds all buffers
KEEPS_BYTES = 24 << 20  # growth allowed between the second round and the last
SPARE_TASKS = 3  # connections that are just ending


@pytest.fixture(scope="module")
def paced_front(hard_model: Path) -> Iterator[PacedFront]:
    """A front with ranks that take time for each step."""
    front = PacedFront(hard_model, step_s=STEP_S).attach_all()
    yield front
    assert front.close() == (0, "")


def clients(front: PacedFront, count: int, seed: int) -> list[Streamed]:
    """Create clients with known answers: the repeated prompt."""
    choice = random.Random(seed)
    asked = []
    for number in range(count):
        manner = choice.choices((Manner.LEAVES, Manner.SLOW, Manner.WHOLE), (10, 3, 17))[0]
        prompt = f"{number} the cat \u20ac sat \U0001f600 on {seed} "
        repeats = SHORT_REPEATS if manner is Manner.WHOLE else LONG_REPEATS
        num_tokens = min(len(front.encode(prompt)) * repeats, MAX_LEN - len(front.encode(prompt)))
        body = {"prompt": prompt, "max_tokens": num_tokens, "stream_options": {"include_usage": True}}
        body["n"] = SLOW_CHOICES if manner is Manner.SLOW else choice.choice((1, 1, 1, 2))
        asked.append(Streamed(body=body, manner=manner, leaves_after=choice.randrange(1, 12)))
    return asked


def check(front: PacedFront, asked: list[Streamed]) -> None:
    """Check that clients that stayed got the whole answer, and that the others were being answered."""
    for each in asked:
        assert each.status == 200
        if each.manner is Manner.LEAVES:
            continue
        prompt_ids, num_tokens = front.encode(each.body["prompt"]), each.body["max_tokens"]
        ids = [prompt_ids[place % len(prompt_ids)] for place in range(num_tokens)]
        expected = front.tokenizer.decode(ids)
        for index in range(each.body["n"]):
            assert each.text[index].rstrip("\ufffd") == expected.rstrip("\ufffd"), each.manner
            assert each.finish_reasons[index] == "length"
        assert each.usage is not None and each.usage["completion_tokens"] == num_tokens * each.body["n"]
        assert each.is_done


def soak(front: PacedFront, count: int, rounds: int) -> list[int]:
    """Run rounds and return the front's memory after each."""
    front.wait_settled(num_tasks=1000)
    num_tasks = front.held["wideep:front_tasks"] + SPARE_TASKS
    descriptors, sizes = num_descriptors(front.process.pid), []
    for number in range(rounds):
        asked = clients(front, count, seed=number)
        asyncio.run(run(front.url, asked))
        check(front, asked)
        front.wait_settled(num_tasks)
        assert [rank.num_free_blocks for rank in front.ranks] == [NUM_BLOCKS] * len(front.ranks)
        wait_until(
            lambda: num_descriptors(front.process.pid) <= descriptors + SPARE_TASKS,
            lambda: f"{num_descriptors(front.process.pid)} descriptors, {descriptors} before",
        )
        sizes.append(rss_bytes(front.process.pid))
    return sizes


@pytest.mark.slow
def test_five_hundred_streams_round_after_round(paced_front: PacedFront) -> None:
    sizes = soak(paced_front, count=500, rounds=4)
    assert sizes[-1] - sizes[1] < KEEPS_BYTES, [size >> 20 for size in sizes]
    assert sum(rank.num_aborted for rank in paced_front.ranks) > 0, "clients that leave free their blocks"
    assert paced_front.figures()["vllm:request_success_total"] >= 500
