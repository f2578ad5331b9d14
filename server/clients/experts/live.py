"""Run `wideep experts load` and `wideep experts record`: the load of a running service's experts.

`load` prints a table. On a terminal, it refreshes the table until Ctrl-C and cuts it to the terminal's size; `--json`
prints the response of GET /experts/load unchanged.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server.clients.url_flag import pool_query
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable

_CLEAR = "\x1b[2J\x1b[H"  # clear the screen, then home (ECMA-48)
WIDE = 120  # columns of a table without a terminal
_RANK_COLUMNS = 68  # of the table of ranks, without the host name
_PHASES = ("prefill", "decode")


def run_live(
    args: argparse.Namespace,
    *,
    sleep: Callable[[float], None] = time.sleep,
    environment: Mapping[str, str] = os.environ,
) -> int:
    """Run the verb and return the exit status."""
    try:
        with ServiceClient(args.url, api_key_of(environment), query=pool_query(args)) as client:
            if args.verb == "record":
                return _record(client, args.seconds, args.out, sleep)
            return _load(client, args, sleep)
    except (ServiceError, OSError) as error:
        print(f"wideep experts {args.verb}: {error}", file=sys.stderr)
        return 1


def _load(client: ServiceClient, args: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    if args.json:
        print(json.dumps(client.get_json("/experts/load")))
        return 0
    is_live = sys.stdout.isatty() and not args.once
    while True:
        load = client.get_json("/experts/load")
        if is_live:
            width, height = shutil.get_terminal_size()
            print(f"{_CLEAR}{fitting_table(load, args.rows, width=width, height=height)}", end="", flush=True)
        else:
            print(load_table(load, args.rows), flush=True)
        if not is_live:
            return 0
        try:
            sleep(args.every)
        except KeyboardInterrupt:
            return 0


def _record(client: ServiceClient, seconds: float, out: Path, sleep: Callable[[float], None]) -> int:
    """Record for some time, or until Ctrl-C, and write the service's recording."""
    shape = client.get_json("/experts/load")
    client.post("/start_expert_distribution_record")
    print(f"recording for {seconds:g} s; Ctrl-C ends it earlier", file=sys.stderr)
    try:
        sleep(seconds)
    except KeyboardInterrupt:
        print("", file=sys.stderr)
    client.post("/stop_expert_distribution_record")
    content = client.get_bytes("/experts/record")
    out.write_bytes(content)
    ranks, slots = shape["num_ranks"], shape["num_ranks"] * shape["slots_per_rank"]
    print(
        f"written {out} ({len(content) / 1e6:.2f} MB); try: wideep experts simulate {out} --ranks {ranks} --slots "
        f"{slots}"
    )
    return 0


def fitting_table(load: Mapping[str, Any], rows: int, *, width: int, height: int) -> str:
    """Return the load as text that fits a terminal of this size without wrapping or scrolling.

    Args:
        load: Response of GET /experts/load.
        rows: Maximum number of layers, experts and ranks; fewer if the terminal is too small.
        width: Number of columns. height: Number of lines.
    """
    for fewer in range(rows, 0, -1):
        lines = _wrapped(load_table(load, fewer, width), width)
        if len(lines) <= height:
            break
    return "\n".join(lines[:height])


def _wrapped(text: str, width: int) -> list[str]:
    """Return a text's lines; sentences are wrapped, rows of tables are cut."""
    lines = []
    for line in text.splitlines():
        is_row = line.startswith(" ") or "  " in line
        lines += [line[:width]] if is_row or not line else textwrap.wrap(line, width)
    return lines


def load_table(load: Mapping[str, Any], rows: int, width: int = WIDE) -> str:
    """Return the load as text: phases, what ranks wait for, ranks, the worst layers and the hottest experts.

    Args:
        load: Response of GET /experts/load.
        rows: Maximum number of layers, of experts and of ranks.
        width: Number of columns, to which host names are cut.
    """
    window = load["window"]
    head = (
        f"{load['model']}: {load['num_layers']} MoE layers of {load['num_experts']} experts in "
        f"{load['slots_per_rank']} slots on each of {load['num_ranks']} ranks, placement {load['placement_version']}"
    )
    if not window["steps"]:
        return printable(f"{head}\nno load yet: no step has run")
    lines = [head, f"the last {window['steps']} steps, {window['seconds']:.1f} s", "", *_phase_lines(load)]
    lines += ["", f"waiting: {load['why']['sentence']}", "", *_rank_lines(load, rows, width)]
    return printable("\n".join([*lines, "", *_layer_lines(load, rows), "", *_expert_lines(load, rows)]))


def _phase_lines(load: Mapping[str, Any]) -> list[str]:
    lines = [f"{'phase':8} {'picks':>12} {'balancedness':>13} {'median':>7} {'worst':>7}"]
    for phase in _PHASES:
        even = load["phases"][phase]["balancedness"]
        total = sum(map(sum, load["phases"][phase]["tokens"]))
        lines.append(
            f"{phase:8} {total:12,} {_part(even['mean']):>13} {_part(even['median']):>7} {_part(even['worst']):>7}"
        )
    drafts = sum(rank["draft_tokens"] for rank in load["ranks"])
    decodes = sum(rank["decode_tokens"] for rank in load["ranks"])
    if drafts:
        lines.append(f"drafts: {drafts:,} of the {decodes:,} decode tokens were drafts")
    return lines


def _rank_lines(load: Mapping[str, Any], rows: int, width: int) -> list[str]:
    got = [0] * load["num_ranks"]
    for phase in _PHASES:
        for layer in load["rank_tokens"][phase]:
            got = [total + count for total, count in zip(got, layer, strict=True)]
    host_width = max(4, min(16, width - _RANK_COLUMNS))
    lines = [
        f"{'rank':>5} {'host':{host_width}} {'tokens':>9} {'experts got':>11} {'experts s':>9} {'dispatch s':>10} "
        f"{'combine s':>9} {'sent MB':>8}"
    ]
    for rank, num_got in sorted(zip(load["ranks"], got, strict=True), key=lambda each: -each[1])[:rows]:
        sent = (sum(rank["dispatch_bytes"]) + sum(rank["combine_bytes"])) / 1e6
        lines.append(
            f"{rank['rank']:5} {(rank['host'] or '?')[:host_width]:{host_width}} {rank['tokens']:9,} {num_got:11,} "
            f"{rank['experts_s']:9.2f} {rank['dispatch_wait_s']:10.2f} {rank['combine_wait_s']:9.2f} {sent:8.1f}"
        )
    return [*lines, *_more(len(load["ranks"]), rows, "ranks")]


def _layer_lines(load: Mapping[str, Any], rows: int) -> list[str]:
    by_phase = [load["phases"][phase]["balancedness"]["per_layer"] for phase in _PHASES]
    worst = [
        min((even for even in pair if even is not None), default=2.0) for pair in zip(*by_phase, strict=True)
    ]
    lines = [f"{'layer':>5} {'prefill':>8} {'decode':>8}  balancedness, worst layers first"]
    for index in sorted(range(len(worst)), key=lambda index: (worst[index], index))[:rows]:
        prefill, decode = (_part(even[index]) for even in by_phase)
        lines.append(f"{load['layers'][index]:5} {prefill:>8} {decode:>8}")
    return [*lines, *_more(len(worst), rows, "layers")]


def _expert_lines(load: Mapping[str, Any], rows: int) -> list[str]:
    found = []
    for phase in _PHASES:
        for layer, tokens in zip(load["layers"], load["phases"][phase]["tokens"], strict=True):
            mean = sum(tokens) / len(tokens)
            if mean:
                found += [(count / mean, layer, expert, phase) for expert, count in enumerate(tokens)]
    found.sort(key=lambda entry: (-entry[0], entry[1:]))
    lines = [f"{'layer':>5} {'expert':>7} {'phase':8} times its layer's mean, hottest experts first"]
    return [
        *lines,
        *(f"{layer:5} {expert:7} {phase:8} {ratio:.2f}" for ratio, layer, expert, phase in found[:rows]),
    ]


def _more(count: int, rows: int, what: str) -> list[str]:
    return [f"... and {count - rows} more {what} (--rows)"] if count > rows else []


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
