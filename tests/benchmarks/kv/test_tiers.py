"""The benchmark of KV tiers: which requests it takes, what an unlimited cache would find, and its figures."""

import argparse
import json
import random
from pathlib import Path

import pytest

from benchmarks.kv import tiers
from benchmarks.kv.tiers import TieredLoad
from kvcache.paged_cache import BLOCK_TOKENS
from server.tools.bench.stream import StreamedAnswer
from server.tools.traces import TracedRequest, TraceError
from tests.support.service.real_service import write_tiny_model


def test_a_sample_has_all_turns_of_its_conversations_in_the_trace_s_order() -> None:
    trace = [TracedRequest(float(at), 1024, 5, (0, 1 + at % 10, 100 + at)) for at in range(40)]
    sample = tiers.sampled_conversations(trace, 3)
    assert len(sample) == 12 and len({request.hash_ids[1] for request in sample}) == 3
    assert [request.arrival_s for request in sample] == sorted(request.arrival_s for request in sample)
    assert tiers.sampled_conversations(trace, 3) == sample, "the same every time"
    assert tiers.sampled_conversations(trace, 99) == trace
    assert len(tiers.sampled_conversations([TracedRequest(0.0, 9, 1, (4,))], 1)) == 1, "a prompt of one id"
    long = [*trace[:-1], trace[-1]._replace(input_tokens=1024 * tiers.MOST_TIMES * 2)]
    kept = tiers.sampled_conversations(long, 99)
    assert len(kept) == 36 and trace[-1].hash_ids[1] not in {request.hash_ids[1] for request in kept}
    with pytest.raises(TraceError, match="no hash ids"):
        tiers.sampled_conversations([TracedRequest(0.0, 9, 1, ())], 1)


def test_a_synthetic_turn_begins_with_the_turn_before() -> None:
    requests = tiers.synthetic_conversations(5)
    assert len(requests) == 5 * tiers.TURNS
    for before, after in zip(requests, requests[5:], strict=False):
        assert after.hash_ids[: len(before.hash_ids)] == before.hash_ids
        assert 3 <= len(after.hash_ids) - len(before.hash_ids) <= 9
    assert len({request.hash_ids[1] for request in requests}) == 5, "only the first block is common"
    for request in requests:
        assert tiers.lengths_of(request, 0.03).prompt_tokens == round(0.03 * request.input_tokens)


def test_shared_tokens_are_those_of_an_unlimited_cache() -> None:
    draw = random.Random(1)
    prompts: list[list[int]] = []
    for _ in range(60):
        base = draw.choice(prompts) if prompts and draw.random() < 0.7 else []
        prompts.append(
            base[: draw.randrange(len(base) + 1)] + [draw.randrange(3) for _ in range(draw.randrange(1, 70))]
        )
    load = tiers.load_of(prompts)
    blocks: set[tuple[int, ...]] = set()  # the slow oracle: whole prefixes instead of chained hashes
    for prompt, shared in zip(prompts, load.shared_tokens, strict=True):
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        found = 0
        for end in ends:
            if end < len(prompt) and tuple(prompt[:end]) in blocks and found == end - BLOCK_TOKENS:
                found = end
        assert shared == found
        blocks |= {tuple(prompt[:end]) for end in ends}
    assert load.distinct_tokens == BLOCK_TOKENS * len(blocks)
    assert sum(load.shared_tokens) > 0 and load.prompt_tokens == sum(map(len, prompts))


def test_the_kv_cache_has_the_wanted_share_or_room_for_the_longest_request() -> None:
    args = argparse.Namespace(ranks=2, clients=3, tokens=8, share=0.1)
    load = TieredLoad([[0] * 100], [0], 20_000)
    flags, pool_tokens = tiers.service_flags(args, load, 10)
    assert pool_tokens == 2000 and "--kv-cache-memory=10000B" in flags and "--max-model-len=112" in flags
    _, pool_tokens = tiers.service_flags(args, load._replace(distinct_tokens=100), 10)
    assert pool_tokens == 2 * (112 + 16 * 4)


def answer(ttft_s: float, *, cached: int = 0, failure: str = "") -> StreamedAnswer:
    return StreamedAnswer(
        start_s=1.0, end_s=2.0 + ttft_s, arrivals_s=[1.0 + ttft_s], prompt_tokens=32, output_tokens=1, cached_tokens=cached,
        has_usage=True, failure=failure,
    )  # fmt: skip


def test_a_row_tells_later_turns_from_first_ones() -> None:
    load = TieredLoad([[0] * 32] * 4, [0, 16, 16, 0], 64)
    answers = [answer(0.4), answer(0.1, cached=16), answer(0.3, cached=16), answer(9.0, failure="gone")]
    row = tiers.row_of(answers, load, {"host": 32.0, "load_bytes": 1e6, "faults": 1.0})
    assert (row["num_failed"], row["failures"], row["later_turns"]) == (1, {"gone": 1}, 2)
    assert row["hits"] == round(32 / 96, 4) and row["later_ttft_p50_ms"] == pytest.approx(200)
    assert row["ttft_p50_ms"] == pytest.approx(300) and row["cached_tokens"] == {
        "device": 0,
        "host": 32,
        "disk": 0,
    }
    assert (row["load_bytes"], row["faults"], row["dropped"]) == (1e6, 1, 0)
    assert "2 later turns p50 200 ms" in tiers.line_of(row) and "1 failed" in tiers.line_of(row)


def test_ratios_compare_the_same_pass() -> None:
    services = {
        "none": {"first": {"ttft_p50_ms": 200.0}, "again": {"ttft_p50_ms": 100.0}},
        "disk": {"first": {"ttft_p50_ms": 150.0}, "again": {"ttft_p50_ms": 25.0}},
        "disk after kill -9": {"again": {"ttft_p50_ms": 30.0}},
        "failed": {"again": {"ttft_p50_ms": None}},
    }
    assert tiers.ratios_of(services) == {
        "disk": {"first": 0.75, "again": 0.25}, "disk after kill -9": {"again": 0.3}, "failed": {},
    }  # fmt: skip


def test_files_stay_whole_when_they_leave_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "blocks").write_bytes(b"x" * 10_000)
    tiers.drop_page_cache(tmp_path)
    assert (tmp_path / "kv" / "blocks").read_bytes() == b"x" * 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("forked_services")
def test_every_service_answers_every_prompt_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    words = ["--model", str(model), "--conversations", "3", "--token-scale", "0.004", "--tokens", "3"]
    assert tiers.main([*words, "--folder", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["services"]) == ["none", "host", "disk", "disk after kill -9"]
    assert result["equal_answers"] and 0 < result["load"]["ideal_hits"] < 1
    assert result["services"]["none"]["again"]["cached_tokens"]["host"] == 0
    assert set(result["ttft_p50_over_none"]["disk after kill -9"]) == {"again"}
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "the tier's folder is removed"
