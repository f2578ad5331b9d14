"""Tables of `benchmarks.serve`'s rows, and their summaries: medians over rounds, and ratios within a round."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

PEER = "transformers"
METRICS = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
_COLUMNS = ("tok/s", "TTFT p50", "p99", "ITL p50", "p99", "PSS MiB")
_WIDTH = 10


def summary_of(level: dict[str, Any]) -> dict[str, Any]:
    """Reduce a level's rows to one entry per program.

    A program's medians are over its quiet rounds. If no round was quiet they are over all, and `noisy` is true. Its ratio to
    the peer is the median of the ratios of rounds in which both were quiet, or of all rounds if there are none.
    """
    by_program: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in level["rows"]:
        by_program[row["program"]][row["round"]] = row
    programs = {}
    for name, rows in by_program.items():
        quiet = [row for row in rows.values() if not row["noisy"]]
        counted = quiet or list(rows.values())
        programs[name] = {
            **{metric: round(statistics.median(row[metric] for row in counted), 1) for metric in METRICS},
            "peak_pss_mib": max(row["peak_pss_mib"] for row in rows.values()),
            "times_peer": _times_peer(rows, by_program[PEER]),
            "rounds": len(counted),
            "noisy": not quiet,
        }
    return {**{key: value for key, value in level.items() if key != "rows"}, "programs": programs}


def _times_peer(rows: dict[int, dict[str, Any]], peer: dict[int, dict[str, Any]]) -> float:
    """Return the median over rounds of our tokens/s over the peer's."""
    pairs = [(rows[number], peer[number]) for number in rows if number in peer]
    quiet = [(our, their) for our, their in pairs if not (our["noisy"] or their["noisy"])]
    ratios = [our["tokens_per_s"] / their["tokens_per_s"] for our, their in quiet or pairs]
    return float(round(statistics.median(ratios), 2))


def print_level(level: dict[str, Any]) -> None:
    """Print the measurements at one concurrency, row by row."""
    print(
        f"   concurrency {level['concurrency']}, {level['requests']} requests; {PEER}: {_peer_words(level)}"
    )
    for row in level["rows"]:
        print(
            f"     round {row['round'] + 1}  {row['program']:<13} {row['tokens_per_s']:8.1f} tok/s   "
            f"{row['own_cores']:.2f} cores, others {row['other_cores']:.2f}{' ~' if row['noisy'] else ''}"
        )
    print(end="", flush=True)


def _peer_words(level: dict[str, Any]) -> str:
    """Return the settings that were tried and the chosen one."""
    tried = ", ".join(f"{name} {rate:.0f}" for name, rate in level["peer_settings_tried"].items())
    return f"uses {level['peer_setting']} of [{tried} tok/s]"


def print_summary(name: str, summary: Sequence[dict[str, Any]]) -> None:
    """Print a model's table."""
    head = "".join(f"{column:>{_WIDTH}}" for column in _COLUMNS)
    print(f"\n{name}: medians; times in ms; ~ is noisy\n{'clients':>8}  {'program':<18}{head}   x {PEER}")
    for level in summary:
        for program, entry in level["programs"].items():
            values = [*(entry[metric] for metric in METRICS), entry["peak_pss_mib"]]
            cells = "".join(f"{value:>{_WIDTH}}" for value in values)
            mark = "~" if entry["noisy"] else " "
            print(f"{level['concurrency']:>8}  {program:<18}{cells}  {mark}{entry['times_peer']:.2f}")
        if level["static"] is not None:
            mark = " ~" if level["static"]["noisy"] else ""
            print(f"{'':>8}  {'generate (static)':<18}{level['static']['tokens_per_s']:>{_WIDTH}}{mark}")
    print(flush=True)
