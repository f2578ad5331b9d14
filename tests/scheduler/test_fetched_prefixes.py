"""A prefix from another node changes no bit: an engine fetches what another one has computed, for every kind of cache."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.foreseeing import foresee
from kvcache.tiers.frames import Channel
from kvcache.tiers.peers import PeerNetwork
from kvcache.unit import sum_of_bytes
from scheduler.assembly import Assembled
from scheduler.policy.request import Request
from scheduler.policy.speculative import parse_speculative_config
from tests.scheduler.drafts.test_served_drafts import MTP, SHARE, always_draft
from tests.scheduler.test_invariance import SAVED_FAMILIES, Answers, collect, requests
from tests.support.engines.serving import build, serve
from tests.support.models.families import write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint

HOST = 64 << 20
NETWORK = PeerNetwork("127.0.0.1", b"a secret of this service")
DRAFTS = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')


@pytest.fixture(scope="module", params=SAVED_FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    """Return a checkpoint and every request served alone, without a prefix cache or tiers."""
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    built = build(directory, max_model_len=160, enable_prefix_caching=False)
    return directory, collect(serve(built, *([one] for one in requests())).outputs)


@pytest.fixture
def engine() -> Iterator[Callable[..., Assembled]]:
    """Return a function that assembles engines, each on another node. They are closed after the test."""
    made: list[Assembled] = []

    def make(directory: Path, **settings: Any) -> Assembled:
        built = build(directory, max_model_len=160, kv_offloading_bytes=HOST, network=NETWORK, **settings)
        made.append(built)
        return built

    yield make
    for built in made:
        built.engine.close()


def address_of(built: Assembled) -> str:
    assert built.kv_peer is not None
    return built.kv_peer.address


def compute(built: Assembled, wanted: Sequence[Request]) -> None:
    """Serve requests, and wait until all their blocks are in host memory."""
    serve(built, wanted)
    tables = built.scheduler._tables.tiers
    assert tables is not None
    collect_until(built, lambda: not any(tables._num_saves.values()), "the blocks are not saved")


def check_free(built: Assembled) -> None:
    """Check that nothing stays held when all jobs of the tiers are done."""

    def is_free() -> bool:
        return built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks

    collect_until(built, is_free, "blocks stay held")


def collect_until(built: Assembled, is_done: Callable[[], bool], problem: str) -> None:
    """Take what the tiers have done until a condition holds."""
    until_s = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < until_s, problem
        time.sleep(0.001)
        built.scheduler.collect(0.0)


def at(address: str, wanted: Sequence[Request]) -> list[Request]:
    return [replace(request, prefix_at=address) for request in wanted]


@pytest.mark.crossed("family", "settings", every=4)
@pytest.mark.paired("family", "settings", of=2)
@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 1}, {"speculative_config": DRAFTS}], ids=["batch", "one seat", "drafts"]
)
def test_prompts_that_another_node_has_computed_are_fetched(
    family: tuple[Path, Answers], engine: Callable[..., Assembled], settings: dict[str, Any]
) -> None:
    directory, alone = family
    source, client = engine(directory), engine(directory, **settings)
    compute(source, requests())
    outputs = serve(client, at(address_of(source), requests())).outputs
    assert collect(outputs) == alone
    figures = client.scheduler.stats.tiers
    assert figures is not None and figures.peer_hit_tokens > 0 and figures.num_fetches_whole > 0
    assert figures.num_faults == 0
    assert sum(output.num_peer_tokens for output in outputs) == figures.peer_hit_tokens
    check_free(client)


@pytest.mark.crossed("family", every=2)
def test_a_request_goes_on_with_the_blocks_of_the_node_that_had_begun_it(
    family: tuple[Path, Answers], engine: Callable[..., Assembled]
) -> None:
    directory, alone = family
    source, client = engine(directory), engine(directory)
    num_given = {one.request_id: min(12, len(alone[one.request_id]) - 1) for one in requests()}
    begun = [replace(one, params=replace(one.params, max_tokens=12)) for one in requests()]
    compute(source, begun)
    continued = [
        replace(
            one, replayed_ids=tuple(token for token, _ in alone[one.request_id][: num_given[one.request_id]])
        )
        for one in requests()
    ]
    answers = collect(serve(client, at(address_of(source), continued)).outputs)
    assert answers == {name: alone[name][count:] for name, count in num_given.items()}
    figures = client.scheduler.stats.tiers
    assert figures is not None and figures.peer_fetch_bytes > 0 and figures.num_faults == 0
    check_free(client)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"kv_cache_dtype": "fp8"}),
        ("deepseek_v32", {"kv_cache_dtype": "int8"}),
        ("qwen3_next", {"kv_cache_dtype": "int8", "speculative_config": DRAFTS}),
    ],
)
def test_blocks_in_8_bits_are_fetched_with_their_scales(
    name: str, settings: dict[str, Any], tmp_path: Path, engine: Callable[..., Assembled]
) -> None:
    write_checkpoint(name, tmp_path)
    coded = {"kv_cache_dtype": settings["kv_cache_dtype"]}
    alone = build(tmp_path, max_model_len=160, enable_prefix_caching=False, **coded)
    expected = collect(serve(alone, *([one] for one in requests())).outputs)
    source, client = engine(tmp_path, **coded), engine(tmp_path, **settings)
    compute(source, requests())
    assert collect(serve(client, at(address_of(source), requests())).outputs) == expected
    figures = client.scheduler.stats.tiers
    assert figures is not None and figures.peer_hit_tokens > 0 and figures.num_faults == 0
    check_free(client)


@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_layers_that_draft_get_their_rows_from_another_node_too(
    name: str, tmp_path: Path, engine: Callable[..., Assembled]
) -> None:
    """Both nodes draft with the model's own layers (MTP). The client's drafts depend on fetched rows."""
    write_mtp_checkpoint(name, tmp_path, num_layers=1, change=partial(foresee, share=SHARE))
    alone = build(tmp_path, max_model_len=160, enable_prefix_caching=False)
    expected = collect(serve(alone, *([one] for one in requests())).outputs)
    mtp = {"speculative_config": parse_speculative_config(MTP)}
    source, client = engine(tmp_path, **mtp), engine(tmp_path, **mtp)
    num_drafts = [0, 0]
    always_draft(None, num_drafts, client)
    compute(source, requests())
    assert collect(serve(client, at(address_of(source), requests())).outputs) == expected
    figures = client.scheduler.stats.tiers
    assert figures is not None and figures.peer_hit_tokens > 0 and figures.num_faults == 0
    assert num_drafts[0] > 0, "no draft was right"
    check_free(client)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", pytest.param("qwen3_next", marks=pytest.mark.slow)], indirect=True, scope="module"
)
def test_a_peer_that_breaks_off_or_lies_about_what_it_sends_changes_no_answer(
    family: tuple[Path, Answers], engine: Callable[..., Assembled], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, alone = family
    source = engine(directory)
    compute(source, requests())
    send = Channel.send_record

    def damage(channel: Channel, header: Any, record: memoryview) -> None:
        record[20] ^= 1
        send(channel, header, record)

    def break_off(channel: Channel, header: Any, record: memoryview) -> None:
        channel.close()
        raise ConnectionResetError

    for fault in (damage, break_off):
        client = engine(directory)
        monkeypatch.setattr(Channel, "send_record", fault)
        assert collect(serve(client, at(address_of(source), requests())).outputs) == alone
        figures = client.scheduler.stats.tiers
        assert figures is not None and figures.num_fetches_failed > 0 and figures.peer_hit_tokens == 0
        check_free(client)
    client = engine(directory)
    assert collect(serve(client, at("127.0.0.1:1", requests())).outputs) == alone


@pytest.mark.parametrize("family", ["qwen3_moe"], indirect=True, scope="module")
def test_the_comparison_sees_a_wrong_record(
    family: tuple[Path, Answers], engine: Callable[..., Assembled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the checksum, the tests above fail."""
    directory, alone = family
    source, client = engine(directory), engine(directory)
    compute(source, requests())
    tiers = client.engine._tiers
    assert tiers is not None
    keep = tiers.keep

    def keep_another(key: bytes, record: memoryview, checksum: int, **kind: bool) -> bool:
        swapped = bytearray(record)
        for index in range(1, len(swapped), 2):
            swapped[index] ^= 0x80
        return keep(key, memoryview(swapped), sum_of_bytes(memoryview(swapped)), **kind)

    monkeypatch.setattr(tiers, "keep", keep_another)
    assert collect(serve(client, at(address_of(source), requests())).outputs) != alone
