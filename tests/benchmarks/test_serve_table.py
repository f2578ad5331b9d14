from typing import Any

from benchmarks.serve_table import METRICS, summary_of


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
