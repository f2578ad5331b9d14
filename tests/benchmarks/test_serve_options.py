"""Options and table of the serving benchmark, and the settings of transformers as its peer."""

from dataclasses import dataclass
from typing import Any

import pytest
from transformers.generation import ContinuousBatchingConfig

from benchmarks.serving.options import BenchOptionsError, ServedLayout, parse_options
from benchmarks.serving.table import METRICS, summary_of
from benchmarks.serving.transformers_worker import PAGE_TOKENS, page_option


def test_defaults_are_the_whole_measurement() -> None:
    options = parse_options([])
    assert options.models == ("demo", "random")
    assert options.levels == ((1, 2), (4, 8), (16, 16), (32, 32))
    assert (options.rounds, options.prompt_tokens, options.output_tokens) == (3, 128, 64)
    assert options.layouts == (ServedLayout(1, 2), ServedLayout(2, 1))
    assert options.max_model_len == 192
    assert options.max_num_seqs == 32
    assert not options.static


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "demo,gpt"], "--models has 'gpt'; give names of demo, random"),
        (["--concurrency", "1,x"], "--concurrency is '1,x'; give whole numbers above 0"),
        (["--concurrency", "0"], "--concurrency is '0'"),
        (["--rounds", "-1"], "--rounds is '-1'"),
        (["--concurrency", "1,4", "--requests-per-level", "8"], "--requests-per-level has 1 numbers"),
        (["--ranks", "2"], "--ranks has '2'; give ranks x threads such as 1x2"),
        (["--peer-experts", "fast"], "--peer-experts has 'fast'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(arguments: list[str], words: str) -> None:
    with pytest.raises(BenchOptionsError, match=words):
        parse_options(arguments)


def _row(program: str, round_number: int, rate: float, *, noisy: bool = False) -> dict[str, Any]:
    metrics = dict.fromkeys(METRICS, rate)
    return {
        "program": program,
        "round": round_number,
        **metrics,
        "peak_pss_mib": 10 + round_number,
        "noisy": noisy,
    }


def _programs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    programs: dict[str, Any] = summary_of({"concurrency": 4, "rows": rows})["programs"]
    return programs


def test_noisy_rounds_do_not_count_while_there_are_quiet_ones() -> None:
    rows = [_row("ours", 0, 30), _row("ours", 1, 1, noisy=True), _row("ours", 2, 40)]
    rows += [_row("transformers", number, 10) for number in range(3)]
    ours = _programs(rows)["ours"]
    assert (ours["tokens_per_s"], ours["rounds"], ours["noisy"]) == (35, 2, False)
    assert ours["times_peer"] == 3.5
    assert ours["peak_pss_mib"] == 12


def test_with_noisy_rounds_only_all_count_and_the_summary_says_so() -> None:
    rows = [_row("ours", number, 20 * (number + 1), noisy=True) for number in range(2)]
    rows += [_row("transformers", number, 10) for number in range(2)]
    ours = _programs(rows)["ours"]
    assert (ours["tokens_per_s"], ours["times_peer"], ours["noisy"]) == (30, 3.0, True)


@dataclass
class OfOlderVersions:
    block_size: int = 256


@dataclass
class OfNewerVersions:
    page_size: int = 256
    block_size: int | None = None


def test_pages_are_named_as_the_version_at_hand_names_them() -> None:
    assert page_option(OfOlderVersions) == {"block_size": PAGE_TOKENS}
    assert page_option(OfNewerVersions) == {"page_size": PAGE_TOKENS}
    ContinuousBatchingConfig(**page_option(ContinuousBatchingConfig))
