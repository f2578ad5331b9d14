"""Ranks release their memory and get it back: tokens stay the same, tiers keep prefixes, and lost ranks sleep with the others."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expert_placement.placement import Placement
from kvcache.paged_cache import BLOCK_TOKENS
from kvcache.unit import block_parts, filled, state_parts
from moe.expert_weights import digest, read_slot
from moe.model import Skeleton
from scheduler.assembly import Assembled
from scheduler.policy.request import MemoryOrder, RankStats, Request, RequestOutput
from scheduler.policy.tails import Tail
from tests.support.engines.crew import Crew, Doom
from tests.support.engines.serving import PATIENCE_S, build, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.quantise import write_quantised
from tests.support.service.process_figures import rss_bytes

HOST = 64 << 20
CACHE_BYTES = 48 << 20  # the most; the cache is smaller if all seats need less
LEAST_BYTES = 4 << 20
LIGHT, DEEP = MemoryOrder(1, has_cache=False), MemoryOrder(1, has_cache=False, has_experts=False)
AWAKE = MemoryOrder(2)
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.9, "seed": 7, "num_logprobs": 1})


def prompts(count: int) -> list[list[int]]:
    return [[(7 * number + 3 * place) % VOCABULARY for place in range(100)] for number in range(count)]


def requests(name: str, count: int = 4, **how: Any) -> list[Request]:
    return [
        request(f"{name} {number}", prompt, **{"max_tokens": 20, **WAYS[number % 2], **how})
        for number, prompt in enumerate(prompts(count))
    ]


def tokens_of(outputs: list[RequestOutput], name: str) -> dict[str, list[int]]:
    """Return the tokens of the requests with this name, by number."""
    found: dict[str, list[int]] = {}
    for output in outputs:
        if output.request_id.startswith(name):
            found.setdefault(output.request_id.removeprefix(name), []).extend(output.token_ids)
    return found


class Script:
    """Replaces the doorbell: whenever the rank would sleep and has followed the last order, takes the next act."""

    def __init__(self, built: Assembled, *acts: Callable[[], None]) -> None:
        self._memory, self._acts = built.engine.memory, deque((*acts, built.engine.stop))
        self._until_s = time.monotonic() + PATIENCE_S
        built.engine._doorbell = self

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        assert time.monotonic() < self._until_s, "an order is not followed"
        if self._memory._followed is self._memory.ordered:
            self._acts.popleft()()
        else:
            threading.Event().wait(0.001)  # for the reader


def run(built: Assembled, *acts: Callable[[], None]) -> list[RequestOutput]:
    """Run a rank alone through some acts. Return its outputs."""
    outputs: list[RequestOutput] = []

    def on_step(step_outputs: list[RequestOutput], _stats: RankStats) -> None:
        outputs.extend(step_outputs)

    Script(built, *acts)
    built.engine.run(on_step)
    built.engine.close()
    return outputs


def submit(built: Assembled, name: str) -> Callable[[], None]:
    def act() -> None:
        for each in requests(name):
            built.engine.submit(each)

    return act


def order(built: Assembled, memory: MemoryOrder) -> Callable[[], None]:
    return lambda: built.engine.memory.order(memory)


def digests(built: Assembled) -> list[list[bytes]]:
    """Return the check sum of every expert of a rank."""
    return [
        [digest(read_slot(layer, slot).tensors()) for slot in range(layer.up.num_slots)]
        for layer in built.model.layers
    ]


def poison(built: Assembled) -> None:
    """Make a rank lose its experts completely: those of tiny models have less than a page."""
    memory = built.engine.memory
    free = memory._parts.free_experts

    def free_and_falsify() -> None:
        free()
        for layer in built.model.layers:
            for slot in range(layer.up.num_slots):
                for tensor in read_slot(layer, slot).tensors().values():
                    tensor.view(torch.uint8).fill_(60)

    memory._parts = memory._parts._replace(free_experts=free_and_falsify)


def fill_cache(built: Assembled) -> None:
    """Use all memory of a cache, as after a long time."""
    for part in filled([*block_parts(built.runner.cache), *state_parts(built.runner.cache)]):
        part.view(torch.uint8).fill_(0)


@pytest.fixture(
    scope="module", params=["qwen3_moe", "qwen3_next", pytest.param("deepseek_v32", marks=pytest.mark.slow)]
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, made)
    return made


@pytest.mark.crossed("directory", "has_tier", every=2)
@pytest.mark.parametrize("has_tier", [True, False])
def test_prefixes_are_forgotten_by_the_device_and_found_in_the_tiers(directory: Path, has_tier: bool) -> None:
    built = build(directory, max_model_len=160, kv_offloading_bytes=HOST if has_tier else 0)
    asleep: list[int] = []

    def look() -> None:
        stats = built.scheduler.stats
        asleep.append(stats.num_blocks - stats.num_free_blocks)
        assert not any(map(built.scheduler._pool.is_published, range(stats.num_blocks)))

    outputs = run(
        built,
        submit(built, "first"),
        order(built, LIGHT),
        look,
        order(built, AWAKE),
        submit(built, "second"),
        order(built, LIGHT._replace(number=3)),  # waits for blocks that are being saved
        look,
    )
    assert asleep == [0, 0]
    assert tokens_of(outputs, "second") == tokens_of(outputs, "first")
    cached = [each.num_cached_tokens for each in outputs if each.request_id.startswith("second")]
    hosts = [each.num_host_tokens for each in outputs if each.request_id.startswith("second")]
    assert (sum(cached) > 0) == has_tier and sum(hosts) == sum(cached)


def test_a_block_that_is_kept_for_a_request_that_does_not_come_delays_no_order(directory: Path) -> None:
    built = build(directory, max_model_len=160, kv_offloading_bytes=HOST)
    tiers = built.scheduler._tables.tiers
    assert tiers is not None
    (block_id,) = built.scheduler.pool.acquire(1)
    asleep: list[int] = []

    def keep() -> None:
        tiers.tails.put("elsewhere", Tail(block_id, bytes(16), 3, float("inf")))

    def look() -> None:
        asleep.append(built.scheduler.stats.num_free_blocks)

    run(built, submit(built, "first"), keep, order(built, LIGHT), look, order(built, AWAKE))
    assert asleep == [built.scheduler.stats.num_blocks]


@pytest.mark.parametrize("kind", ["plain", "int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_experts_are_read_again_and_have_the_same_bytes(kind: str, tmp_path: Path) -> None:
    if kind == "fp8":
        write_quantised("qwen3_moe", tmp_path, block=(32, 32))
    else:
        write_checkpoint("gpt_oss" if kind == "plain" else "qwen3_moe", tmp_path)
    built = build(tmp_path, max_model_len=160, quantization="int8" if kind == "int8" else None)
    poison(built)
    before, asleep = digests(built), []
    outputs = run(
        built,
        submit(built, "first"),
        order(built, DEEP),
        lambda: asleep.extend(digests(built)),
        order(built, MemoryOrder(2, has_cache=False)),
        lambda: asleep.extend(digests(built)),
        order(built, MemoryOrder(3)),
        submit(built, "second"),
    )
    num_layers = len(before)
    assert all(one != other for one, other in zip(before, asleep[:num_layers], strict=True))
    assert asleep[num_layers:] == before == digests(built)
    assert tokens_of(outputs, "second") == tokens_of(outputs, "first")


def test_without_reading_them_again_the_answers_would_change(directory: Path) -> None:
    built = build(directory, max_model_len=160)
    poison(built)
    memory = built.engine.memory
    memory._parts = memory._parts._replace(read_experts=lambda _is_over: True)
    outputs = run(
        built, submit(built, "first"), order(built, DEEP), order(built, AWAKE), submit(built, "second")
    )
    assert tokens_of(outputs, "second") != tokens_of(outputs, "first")


def test_experts_that_move_while_a_rank_reads_them_are_read_again(directory: Path) -> None:
    built = build(directory, max_model_len=160)
    poison(built)
    before, memory, relocation = digests(built), built.engine.memory, built.relocation
    read, start, num_asked = memory._parts.read_experts, relocation.placement, count()
    target = Placement(np.roll(start.slot_expert, 1, axis=1), start.num_experts, 1, version=1)

    def move_half_way() -> bool:
        if next(num_asked) == 3:
            relocation.prepare(target)  # copies the bytes of released slots
            until_s = time.monotonic() + PATIENCE_S
            while relocation.placement is not target:
                assert time.monotonic() < until_s, "experts do not move"
                threading.Event().wait(0.001)
        return False

    memory._parts = memory._parts._replace(read_experts=lambda _is_over: read(move_half_way))
    run(built, order(built, DEEP), order(built, AWAKE))
    held = target.local(0).tolist()
    assert relocation.placement is target
    assert digests(built) == [
        [layer[expert] for expert in row] for layer, row in zip(before, held, strict=True)
    ]


@pytest.fixture
def crew(directory: Path) -> Iterator[Crew]:
    """Two ranks with a tier in host memory and large, used caches."""
    with Crew(directory, 2, kv_cache_bytes=CACHE_BYTES, kv_offloading_bytes=HOST, prepare=_used) as running:
        yield running


def _used(built: Assembled) -> None:
    fill_cache(built)
    poison(built)


def serve_all(crew: Crew, name: str) -> dict[str, list[int]]:
    """Serve the requests on the crew's members."""
    wanted = requests(name)
    for place, rank in enumerate(crew.members):
        crew.submit(rank, wanted[place :: len(crew.members)])
    crew.until(crew.is_done)
    return {one.request_id.removeprefix(name): crew.tokens[one.request_id] for one in wanted}


def cache_bytes(directory: Path, crew: Crew) -> int:
    """Return the bytes of the blocks of a rank's cache."""
    token_bytes = sum(shape.token_bytes for shape in Skeleton(directory).cache_shapes)
    return crew.stats[0].num_blocks * BLOCK_TOKENS * token_bytes


def memory_of(crew: Crew) -> list[int]:
    return [rss_bytes(crew.processes[rank].pid) for rank in crew.members]


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [LIGHT, DEEP])
def test_the_memory_of_all_ranks_returns_to_the_system_and_back(
    crew: Crew, directory: Path, asleep: MemoryOrder
) -> None:
    first, full = serve_all(crew, "first"), memory_of(crew)
    crew.sleep(asleep)
    freed = [before - after for before, after in zip(full, memory_of(crew), strict=True)]
    held = cache_bytes(directory, crew)
    assert all(each > 0.9 * held > LEAST_BYTES for each in freed), f"{freed} of {held} bytes were freed"
    crew.sleep(AWAKE)
    assert serve_all(crew, "second") == first
    crew.stop()
    for rank in crew.members:
        stats, left = crew.stats[rank], crew.left[rank]
        assert stats.num_free_blocks == stats.num_blocks
        assert left.threads == [] and left.sockets == 0
        assert stats.tiers is not None and stats.tiers.host_load_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [LIGHT, DEEP])
def test_a_rank_that_dies_and_returns_while_asleep_wakes_with_the_others(
    crew: Crew, asleep: MemoryOrder
) -> None:
    first = serve_all(crew, "first")
    crew.sleep(asleep)
    crew.kill(0)
    crew.order([1])
    crew.until(lambda: crew.serve_in(1))
    crew.bring_back(0)
    crew.order([0, 1])
    crew.until(lambda: crew.serve_in(2))
    crew.tell_memory(0, asleep)
    crew.until(lambda: crew.switched == {0: 1, 1: 1})
    crew.sleep(AWAKE)
    assert serve_all(crew, "second") == first
    crew.stop()


@pytest.mark.slow
def test_the_last_rank_wakes_alone_with_the_experts_of_the_lost_one(crew: Crew) -> None:
    first = serve_all(crew, "first")
    crew.sleep(DEEP)
    crew.kill(0)
    crew.order([1])
    crew.until(lambda: crew.serve_in(1))
    crew.sleep(AWAKE)
    assert serve_all(crew, "second") == first
    crew.stop()


@pytest.mark.slow
def test_a_rank_that_dies_while_it_reads_its_experts_again_does_not_keep_the_other_asleep(
    directory: Path,
) -> None:
    wanted = requests("first")
    alone = serve(build(directory, max_model_len=320), wanted).token_ids
    doom = Doom(function="moe.model.Model.read_experts")
    with Crew(directory, 2, dooms={0: doom}, prepare=_used) as crew:
        crew.sleep(DEEP)
        crew.sleep(AWAKE, wait=False)
        crew.until(lambda: crew.lost == [0])
        crew.order([1])
        crew.until(lambda: crew.switched.get(1) == AWAKE.number)
        crew.submit(1, wanted)
        crew.until(crew.is_done)
        assert crew.tokens == alone
        crew.stop()


@pytest.mark.slow
def test_ranks_that_get_the_order_while_they_serve_sleep_when_the_last_one_is_done(directory: Path) -> None:
    wanted = requests("first", max_tokens=60)
    alone = serve(build(directory, max_model_len=320), wanted).token_ids
    with Crew(directory, 2, prepare=_used) as crew:
        crew.submit(0, wanted)
        crew.until(lambda: any(crew.tokens.values()))
        crew.sleep(DEEP)
        assert crew.is_done() and crew.tokens == alone
        crew.sleep(AWAKE)
        crew.submit(
            1, [Request(**{**vars(each), "request_id": f"{each.request_id} again"}) for each in wanted]
        )
        crew.until(crew.is_done)
        assert [crew.tokens[f"{each.request_id} again"] for each in wanted] == [
            alone[each.request_id] for each in wanted
        ]
        crew.stop()
