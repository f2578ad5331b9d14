"""Structured answers under constant eviction to tiers, and moved between ranks at every step, are those of a rank alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler.engine import Engine
from scheduler.policy.request import Expected, Request, Structure, Withdraw
from scheduler.policy.speculative import parse_speculative_config
from tests.fixtures import PoolOf
from tests.scheduler.policy.test_hand_over import prompt_of, rank_of_host
from tests.scheduler.policy.test_tier_tables import ask
from tests.scheduler.structure.test_compiler import compiler_of
from tests.scheduler.structure.test_serving import BYTES, END, FORMS, texts
from tests.scheduler.test_moved_requests import STAY, Pace, serve_moving
from tests.support.engines.serving import build, occupy, request, serve
from tests.support.models.families import write_checkpoint

HOST = 64 << 20
DRAFTS = parse_speculative_config('{"method": "ngram", "num_speculative_tokens": 3}')
FAMILIES = [
    "qwen3_moe",
    *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen3_next", "deepseek_v32", "gpt_oss")),
]
COMMON = [3 + (5 * place) % 90 for place in range(40)]  # a prefix of all prompts


def requests(rank: int = 0) -> list[Request]:
    """Return requests of every form, greedy and seeded, with and without a common prefix, and one without a form."""
    made = [request(f"free {rank}", [*COMMON, 7 + rank], max_tokens=18)]
    for index, (name, form) in enumerate(FORMS.items()):
        for kind, more in (
            ("greedy", {}),
            ("seeded", {"temperature": 1.0, "seed": index + 9 * rank, "top_p": 0.9}),
        ):
            tail = [3 + (11 * index + place + rank) % 90 for place in range(20)]
            prompt = [*COMMON, *tail] if kind == "greedy" else tail
            made.append(
                request(
                    f"{name} {kind} {rank}",
                    prompt,
                    structure=form,
                    max_tokens=18,
                    stop_token_ids=(END,),
                    **more,
                )
            )
    return made


@pytest.mark.crossed("settings", every=3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 23, "max_num_seqs": 4}, {"speculative_config": DRAFTS}],
    ids=["full batch", "chunks", "drafts"],
)
def test_structures_are_the_same_under_constant_eviction(
    tmp_path: Path, family: str, settings: dict[str, Any]
) -> None:
    write_checkpoint(family, tmp_path)
    alone = build(tmp_path, load_vocabulary=lambda: BYTES, max_model_len=128, enable_prefix_caching=False)
    wanted = texts(serve(alone, *([one] for one in requests())))
    built = build(
        tmp_path, load_vocabulary=lambda: BYTES, max_model_len=128, kv_offloading_bytes=HOST, **settings
    )
    occupied = occupy(built, leaving=10)
    again = [Request(**{**vars(each), "request_id": f"{each.request_id} again"}) for each in requests()]
    found = texts(serve(built, requests(), again))
    built.engine.close()
    built.scheduler.collect(0.0)
    assert found == {**wanted, **{f"{name} again": answer for name, answer in wanted.items()}}
    stats = built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks - occupied
    assert stats.tiers is not None and stats.tiers.host_hit_tokens > 0 and stats.tiers.num_faults == 0


@pytest.mark.parametrize("end", ["aborted", "withdrawn", "not compiled"])
def test_an_expected_request_that_ends_before_its_structure_is_compiled_gives_its_blocks_back(
    end: str,
) -> None:
    """Otherwise they are held until the load ends, a minute later: the other rank saves nothing more."""
    rank = rank_of_host()
    compiler, gate = compiler_of(is_open=False)
    scheduler = rank.scheduler
    engine = Engine(0, scheduler, Mock(), Mock(), Mock(), Mock(), compiler, Mock(), memory=Mock())
    comes = ask("r", prompt_of(33))
    form = Structure("regex", "(" if end == "not compiled" else "a")
    comes = replace(comes, params=replace(comes.params, structure=form))
    engine.expect(Expected("r", comes))
    engine.submit(comes)
    engine._take_inbox()
    assert rank.pool.num_free < rank.pool.num_blocks
    engine._has_news.clear()
    if end == "aborted":
        engine.abort("r")
    elif end == "withdrawn":
        engine.withdraw(Withdraw("r"))
    gate.opened.set()
    assert engine._has_news.wait(20)
    (output,) = engine._take_inbox()
    assert output.is_returned or output.finish_reason is not None
    scheduler.collect(0.0)
    assert rank.pool.num_free == rank.pool.num_blocks and not scheduler.holds_blocks
    compiler.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_structures_are_the_same_when_requests_move_at_every_step(
    pool_of: PoolOf, tmp_path: Path, family: str
) -> None:
    """Without tiers, and with a folder that both ranks share."""
    model = tmp_path / "model"
    write_checkpoint(family, model)

    def both(every: Pace, settings: dict[str, Any]) -> tuple[dict[str, Any], int]:
        shares = pool_of(2).run(serve_moving, model, every, settings, False, None, requests)
        return shares[0][0] | shares[1][0], shares[0][1] + shares[1][1]

    wanted, _ = both(STAY, {})
    disk = {"kv_offloading_dir": str(tmp_path / "kv"), "kv_offloading_disk_bytes": HOST, "leaving": 12}
    for settings in ({}, disk):
        found, num_moves = both(Pace(1, 1), settings)
        assert found == wanted and num_moves > 60
