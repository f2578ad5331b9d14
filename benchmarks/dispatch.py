"""What does one dispatch plus one combine cost between ranks on one host, in both modes, over shm and over gloo?

Peer: `all_to_all_single` over gloo with the same rows and sizes known in advance. Bound: a layer's bytes over the wire's
ceiling, measured in the same run with messages of 2 MiB that are copied in, exchanged and copied out.
Goals: normal mode at most 1.3 x the peer on gloo; shm at least 3 x as fast as gloo at 1 to 64 tokens.
`all_gather` is a lower bound for a mode that would send every token to every rank (dispatch only). If it is not below low
latency's dispatch, such a mode cannot be faster.

    python -m benchmarks.dispatch [--ranks 2 4] [--tokens 1 4 16 64 128 512] [--choices 8] [--runs 100] [--save]

The ways take turns in blocks, so that noise of the machine affects all of them. Figures are medians and 99th percentiles
over the runs of rank 0. The last line is one JSON object.
"""

import argparse
from typing import Any

import numpy as np

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.dispatch_ways import CHOICES, SCALE, WIRES, MeasuredWay, Times, measure
from tests.support.ranks import RankPool

MODES = ("normal", "low_latency", "fp8")
MANY_TOKENS = 128  # from this number of tokens, a third of the (long) runs is enough
GOAL_PLAIN, GOAL_SHM, GOAL_SHM_TOKENS = 1.3, 3.0, 64


def summarise(times: list[Times]) -> dict[str, float]:
    """Return the median of each way, and the median and 99th percentile of both, in microseconds."""
    both = np.array(times) * 1e6
    total = both.sum(axis=1)
    return {
        "best_dispatch_us": round(float(both[:, 0].min()), 1),
        "dispatch_us": round(float(np.median(both[:, 0])), 1),
        "combine_us": round(float(np.median(both[:, 1])), 1),
        "p50_us": round(float(np.median(total)), 1),
        "p99_us": round(float(np.quantile(total, 0.99)), 1),
    }


def row_of(ranks: int, tokens: int, measured: MeasuredWay) -> dict[str, Any]:
    """Return the figures of one size: every way, compared with peer, goal and bound."""
    ways = {name: summarise(times) for name, times in measured.seconds.items()}
    plain_us = ways["plain"]["p50_us"]
    row: dict[str, Any] = {
        "ranks": ranks,
        "tokens": tokens,
        "runs": len(measured.seconds["plain"]),
        "ways": ways,
    }
    row["sent_bytes"] = {name: list(both) for name, both in measured.sent_bytes.items()}
    row["ceiling_gb_s"] = {name: round(rate / 1e9, 2) for name, rate in measured.ceiling.items()}
    row["over_plain"], row["over_ceiling"] = {}, {}
    for name, both in measured.sent_bytes.items():
        if name != "plain":
            bound_us = sum(both) / measured.ceiling[name.split()[0]] * 1e6
            row["over_plain"][name] = round(ways[name]["p50_us"] / plain_us, 2)
            row["over_ceiling"][name] = round(ways[name]["p50_us"] / bound_us, 2)
    row["gloo_over_shm"] = {
        mode: round(ways[f"gloo {mode}"]["p50_us"] / ways[f"shm {mode}"]["p50_us"], 1) for mode in MODES
    }
    row["all_gather_over_low_latency"] = {
        name: round(ways[f"{name} all_gather"]["dispatch_us"] / ways[f"{name} low_latency"]["dispatch_us"], 2)
        for name in WIRES
    }
    return row


def print_row(row: dict[str, Any]) -> None:
    """Print one size, one line per way."""
    ceiling = ", ".join(f"{name} {rate} GB/s" for name, rate in row["ceiling_gb_s"].items())
    print(f"{row['ranks']} ranks, {row['tokens']} tokens each, {row['runs']} runs; ceiling {ceiling}")
    for name, way in row["ways"].items():
        text = f"  {name:17s} dispatch {way['dispatch_us']:8.0f}  combine {way['combine_us']:8.0f}"
        text += f"  both {way['p50_us']:8.0f}  p99 {way['p99_us']:8.0f} us"
        if name in row["sent_bytes"]:
            text += f"  {sum(row['sent_bytes'][name]) / 1024:8.1f} KiB"
        if name in row["over_plain"]:
            text += f"  {row['over_plain'][name]:5.2f} x plain  {row['over_ceiling'][name]:6.1f} x bound"
        print(text)
    shm = ", ".join(f"{mode} {ratio} x" for mode, ratio in row["gloo_over_shm"].items())
    floor = ", ".join(f"{name} {ratio}" for name, ratio in row["all_gather_over_low_latency"].items())
    print(f"  gloo over shm: {shm}; all_gather's floor over low latency's dispatch: {floor}\n", flush=True)


def verdicts(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare the rows with the goals and list those that miss them."""
    plain = {(r["ranks"], r["tokens"]): r["over_plain"]["gloo normal"] for r in rows}
    shm = {
        (r["ranks"], r["tokens"]): r["gloo_over_shm"]["normal"]
        for r in rows
        if r["tokens"] <= GOAL_SHM_TOKENS
    }
    return {
        "gloo_over_plain_worst": max(plain.values()),
        "gloo_over_plain_missed": [[*key, value] for key, value in plain.items() if value > GOAL_PLAIN],
        "gloo_over_shm_worst": min(shm.values(), default=None),
        "gloo_over_shm_missed": [[*key, value] for key, value in shm.items() if value < GOAL_SHM],
    }


def main() -> None:
    """Run every size with every number of ranks and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 128, 512])
    parser.add_argument("--choices", type=int, default=CHOICES)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--save", action="store_true", help="write the result under benchmarks/results/")
    args = parser.parse_args()
    card = environment_card()
    print_card(card)
    print(f"{SCALE}\n")
    rows = []
    for ranks in args.ranks:
        with RankPool(ranks, timeout_s=300) as pool:
            for tokens in args.tokens:
                runs = args.runs // 3 if tokens >= MANY_TOKENS else args.runs
                rows.append(row_of(ranks, tokens, pool.run(measure, tokens, args.choices, runs)[0]))
                print_row(rows[-1])
    result = {
        "benchmark": "dispatch",
        "environment": card,
        "scale": SCALE,
        "choices": args.choices,
        "goals": verdicts(rows),
        "rows": rows,
    }
    print(f"goals: {result['goals']}")
    if args.save:
        print(f"saved {save_result('dispatch', result).name}")
    print_tail(result)


if __name__ == "__main__":
    main()
