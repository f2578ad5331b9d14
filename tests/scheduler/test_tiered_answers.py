"""Tiers change no bit: not under constant eviction, not after a restart, and not for a rank that takes over requests, of a lost rank
or of one that runs prompts only."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.foreseeing import foresee
from kvcache.tiers.figures import TierFigures
from kvcache.tiers.jobs import FetchJob, LoadJob, SaveJob
from kvcache.unit import CacheUnit, block_parts
from scheduler.assembly import Assembled
from scheduler.policy.config import ConfigError
from scheduler.policy.request import Request, RequestOutput
from scheduler.policy.speculative import parse_speculative_config
from tests.scheduler.drafts.test_served_drafts import MTP, SHARE
from tests.scheduler.test_invariance import SAVED_FAMILIES, Answers, collect, requests
from tests.support.engines.crew import Crew
from tests.support.engines.serving import build, occupy, request, serve
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint

HOST = 64 << 20
DRAFTS = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture(scope="module", params=SAVED_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """Return a checkpoint and every request served alone, without a prefix cache or tiers."""
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    built = build(directory, max_model_len=160, enable_prefix_caching=False)
    return directory, collect(serve(built, *([one] for one in requests())).outputs)


def figures_of(built: Assembled) -> TierFigures:
    figures = built.scheduler.stats.tiers
    assert figures is not None
    return figures


def serve_with_tiers(
    directory: Path, *waves: list[Request], **settings: Any
) -> tuple[list[RequestOutput], TierFigures]:
    """Serve with so few blocks that every request evicts what the others left. Checks that nothing stays held."""
    built = build(directory, max_model_len=160, **settings)
    occupied = occupy(built, leaving=12)
    outputs = serve(built, *waves).outputs
    built.engine.close()
    built.scheduler.collect(0.0)
    stats = built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks - occupied
    return outputs, figures_of(built)


@pytest.mark.crossed("family", "settings", every=4)
@pytest.mark.paired("family", "settings", of=4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 23, "max_num_seqs": 8},
        {"max_num_seqs": 1},
        {"speculative_config": DRAFTS},
    ],
    ids=["full batch", "chunks of 23", "one seat", "drafts"],
)
def test_constant_eviction_to_host_memory_changes_no_bit(
    family: tuple[Path, Answers], settings: dict[str, Any]
) -> None:
    directory, alone = family
    outputs, figures = serve_with_tiers(
        directory, requests(), requests(), kv_offloading_bytes=HOST, **settings
    )
    assert collect(outputs) == alone
    assert figures.host_load_bytes > 0 and figures.host_hit_tokens > 0 and figures.num_faults == 0


@pytest.mark.crossed("kv_cache_dtype", every=2)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("deepseek_v32", marks=pytest.mark.slow)])
def test_blocks_in_8_bits_come_back_with_their_scales(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    coded = {"kv_cache_dtype": kv_cache_dtype}
    built = build(tmp_path, max_model_len=160, enable_prefix_caching=False, **coded)
    alone = collect(serve(built, *([one] for one in requests())).outputs)
    outputs, figures = serve_with_tiers(tmp_path, requests(), requests(), kv_offloading_bytes=HOST, **coded)
    assert collect(outputs) == alone
    assert figures.host_load_bytes > 0 and figures.num_faults == 0


def test_a_folder_with_blocks_of_another_format_is_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3_moe", tmp_path)
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": HOST}
    build(tmp_path, max_model_len=160, kv_cache_dtype="int8", **disk).engine.close()
    for other in ("auto", "fp8"):
        with pytest.raises(ConfigError, match="another model, checkpoint or cache layout"):
            build(tmp_path, max_model_len=160, kv_cache_dtype=other, **disk)


@pytest.mark.crossed("family", every=2)
def test_a_restarted_service_finds_its_blocks_on_the_disk(
    family: tuple[Path, Answers], tmp_path: Path
) -> None:
    directory, alone = family
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": HOST}
    outputs, first = serve_with_tiers(directory, requests(), **disk)
    assert collect(outputs) == alone
    outputs, second = serve_with_tiers(directory, requests(), **disk)
    assert collect(outputs) == alone
    assert first.disk_store_bytes > 0 and second.disk_hit_tokens > first.disk_hit_tokens


@pytest.mark.crossed("family", "settings", every=4)
@pytest.mark.paired("family", "settings", of=4)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 23, "max_num_seqs": 8},
        {"speculative_config": DRAFTS},
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 4}, marks=pytest.mark.slow),
    ],
    ids=["full batch", "chunks of 23", "drafts", "chunks of a block"],
)
def test_a_rank_continues_what_another_one_hands_over(
    family: tuple[Path, Answers], settings: dict[str, Any], tmp_path: Path
) -> None:
    """One after the other, with the same disk. The second computes less than a block of each prompt again, and nothing without states."""
    directory, alone = family
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": HOST}
    wanted = {each.request_id: each for each in requests()}

    def run(given: list[Request]) -> list[RequestOutput]:
        built = build(directory, max_model_len=160, **disk, **settings)
        outputs = serve(built, given).outputs
        built.engine.close()
        built.scheduler.collect(0.0)
        assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
        return outputs

    first = run([replace(each, hands_over=True) for each in wanted.values()])
    handed = {output.request_id: output for output in first if output.is_returned}
    assert handed.keys() == wanted.keys() and all(len(each.token_ids) == 1 for each in handed.values())
    second = run(
        [
            replace(
                wanted[name], replayed_ids=tuple(each.token_ids), num_awaited_tokens=each.num_saved_tokens
            )
            for name, each in handed.items()
        ]
    )
    assert collect([*first, *second]) == alone
    begun = {output.request_id: output for output in reversed(second) if output.token_ids}
    for name, request_ in wanted.items():
        num_prompt = len(request_.prompt_ids)
        assert begun[name].num_cached_tokens == handed[name].num_saved_tokens
        assert num_prompt - handed[name].num_saved_tokens in (
            0,
            num_prompt % 16,
        )  # states are kept at ends of blocks


def test_blocks_are_saved_after_the_draft_layers_have_written_them(tmp_path: Path) -> None:
    """Those layers run after a step, on the tokens that it has chosen. A save in between would copy half of a block."""
    write_mtp_checkpoint("deepseek_v3", tmp_path, change=partial(foresee, share=SHARE))
    chunks = {
        "max_num_batched_tokens": 23,
        "max_num_seqs": 8,
        "speculative_config": parse_speculative_config(MTP),
    }
    built = build(tmp_path, max_model_len=160, kv_offloading_bytes=HOST, **chunks)
    tiers, unit = built.engine._tiers, CacheUnit(block_parts(built.runner.cache))
    assert tiers is not None
    queue, finished, begun = tiers._jobs[1], tiers.finished, dict[SaveJob, int]()
    num_compared = 0

    class Watched:
        """The queue of saves. Sums blocks when they may be copied."""

        empty = queue.empty

        def put(self, job: Any) -> None:
            if isinstance(job, SaveJob):
                begun[job] = unit.take(job.index)
            queue.put(job)

    def compare() -> list[SaveJob | LoadJob | FetchJob]:
        nonlocal num_compared
        ended = finished()
        for job in ended:
            if isinstance(job, SaveJob):
                assert unit.take(job.index) == begun.pop(job), "the block has changed since"
                num_compared += 1
        return ended

    tiers._jobs[1] = Watched()  # type: ignore[call-overload]
    tiers.finished = compare  # type: ignore[method-assign]
    serve(built, requests())
    built.engine.close()
    built.scheduler.collect(0.0)
    assert num_compared > 10 and not begun


@pytest.mark.parametrize("end", ["handed over", "one token"])
def test_draft_layers_also_write_the_blocks_of_a_request_that_leaves_with_its_prompt(
    tmp_path: Path, end: str
) -> None:
    """Such blocks are saved and shared as all others."""
    write_mtp_checkpoint("deepseek_v3", tmp_path, change=partial(foresee, share=SHARE))
    prompt = [(7 * place) % VOCABULARY for place in range(48)]
    stays = request("r", prompt, max_tokens=3)
    leaves = replace(stays, hands_over=True) if end == "handed over" else request("r", prompt, max_tokens=1)

    def draft_blocks(served: Request) -> list[bytes]:
        built = build(
            tmp_path,
            max_model_len=160,
            kv_offloading_bytes=HOST,
            speculative_config=parse_speculative_config(MTP),
        )
        serve(built, [served])
        built.engine.close()
        cache, num_layers = built.runner.cache, built.model.skeleton.num_mtp_layers
        assert num_layers > 0
        block_ids = built.scheduler.pool.match(prompt)
        return [cache.block_bytes(layer, each) for layer in range(-num_layers, 0) for each in block_ids]

    written = draft_blocks(stays)
    assert len(written) == 3 and all(any(each) for each in written)
    assert draft_blocks(leaves) == written


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True, scope="module")
def test_the_comparison_sees_a_wrong_block(family: tuple[Path, Answers], tmp_path: Path) -> None:
    """A record that passes for another one would change the answers: without the checksum, the test above fails."""
    directory, alone = family
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": HOST}
    assert collect(serve_with_tiers(directory, requests(), **disk)[0]) == alone
    built = build(directory, max_model_len=160, **disk)
    assert built.engine._tiers is not None
    store = built.engine._tiers._tiers[0].blocks
    read = store.read

    def misread(key: bytes, buffers: list[memoryview], take: Any) -> Any:
        outcome = read(key, buffers, take)
        buffers[0][0] ^= 0x80
        return outcome

    store.read = misread  # type: ignore[assignment]
    assert collect(serve(built, requests()).outputs) != alone
    built.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_the_rank_that_takes_over_finds_the_blocks_of_the_lost_one(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    prompts = [[(7 * index + 3 * place) % VOCABULARY for place in range(150)] for index in range(3)]
    wanted = [request(str(index), prompt, max_tokens=100) for index, prompt in enumerate(prompts)]
    served = serve(
        build(tmp_path, max_model_len=320, enable_prefix_caching=False), *([one] for one in wanted)
    )
    with Crew(tmp_path, 2, kv_offloading_bytes=HOST) as crew:
        crew.submit(0, wanted)
        crew.until(lambda: all(len(tokens) > 40 for tokens in crew.tokens.values()))
        crew.kill(0)
        crew.order([1])
        crew.replay(0, to=1)
        crew.until(crew.is_done)
        assert crew.tokens == served.token_ids
        figures = crew.stats[1].tiers
        assert figures is not None and figures.host_load_bytes > 0
        crew.bring_back(0)
        crew.order([0, 1])
        again = [request(f"again {index}", prompt, max_tokens=100) for index, prompt in enumerate(prompts)]
        crew.submit(0, again)
        crew.until(crew.is_done)
        assert [crew.tokens[one.request_id] for one in again] == [
            served.token_ids[one.request_id] for one in wanted
        ]
        figures = crew.stats[0].tiers
        assert figures is not None and figures.host_hit_tokens >= 3 * 128, (
            "the restarted rank shares the memory again"
        )
        crew.stop()
