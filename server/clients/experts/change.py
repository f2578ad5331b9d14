"""Run `wideep experts apply`, `rollback` and `history`, through the service's endpoints for placements."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from expert_placement.files import PlacementFileError, load_placement, to_json
from server.clients.url_flag import pool_query
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable

POLL_S = 0.5  # between two queries of a change's progress


def run_change(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Run the verb and return the exit status: 1 if the change or the service failed, 2 for invalid arguments or files."""
    try:
        with client or ServiceClient(args.url, api_key_of(environment), query=pool_query(args)) as service:
            if args.verb == "history":
                return _history(service, args)
            if args.verb == "rollback":
                return _say(_changed(service, "/experts/rollback", {}, sleep), args.json)
            return _apply(service, args, sleep)
    except (ServiceError, PlacementFileError) as error:
        print(f"wideep experts {args.verb}: {error}", file=sys.stderr)
        return 2 if isinstance(error, PlacementFileError) else 1


def _apply(service: ServiceClient, args: argparse.Namespace, sleep: Callable[[float], None]) -> int:
    body: dict[str, Any] = {"policy": args.policy}
    if args.placement is not None:
        if args.dry_run:
            print("wideep experts apply: --dry-run cannot be used with --placement", file=sys.stderr)
            return 2
        body = {"placement": to_json(load_placement(args.placement))}
    if args.dry_run:
        plan = service.post("/experts/plan", body).json()
        print(json.dumps(plan) if args.json else printable(f"{plan['reason']}\nnothing was changed"))
        return 0
    return _say(_changed(service, "/experts/apply", body, sleep), args.json)


def _changed(
    service: ServiceClient, path: str, body: dict[str, Any], sleep: Callable[[float], None]
) -> dict[str, Any]:
    """Start a change, wait without a timeout until it ends, and return its entry in the history.

    Raises:
        ServiceError: The service refuses the change, cannot be reached any more, or was restarted.
    """
    number = service.post(path, {**body, "wait": False}).json()["change"]
    shown = None
    while True:
        found = service.get_json("/experts/history")
        entries = [entry for entry in found["history"] if entry.get("change") == number]
        under_way = found["under_way"]
        if under_way is None or under_way["change"] != number:
            if not entries:
                raise ServiceError("the change is not in the service's history: the service was restarted")
            return dict(entries[-1])
        if under_way["stages"] != shown:
            shown = under_way["stages"]
            print(f"{shown[0]} of {shown[1]} stages serve", file=sys.stderr, flush=True)
        sleep(POLL_S)


def _say(entry: Mapping[str, Any], as_json: bool) -> int:
    """Print the result of a change, and return the exit status."""
    if as_json:
        print(json.dumps(entry))
    else:
        done, stages = entry["stages"]
        kind, reason = entry["kind"], entry["reason"]
        print(printable(reason if reason.startswith(f"{kind}: ") else f"{kind}: {reason}"))
        if stages:
            print(
                f"placement {entry['version']} serves: {entry['moves']} moves, {entry['bytes'] / 1e6:.1f} MB in "
                f"{entry['seconds']:.1f} s"
            )
        else:
            print(f"placement {entry['version']} still serves: no change was needed")
        if entry["failed"]:
            print(printable(f"dropped after {done} of {stages} stages: {entry['failed']}"))
    return 1 if entry["failed"] else 0


def _history(service: ServiceClient, args: argparse.Namespace) -> int:
    found = service.get_json("/experts/history")
    entries = found["history"][-args.rows :]
    if args.json:
        print(json.dumps({**found, "history": entries}))
        return 0
    print(history_table(entries, found["serving"]["version"]))
    return 0


def history_table(entries: list[dict[str, Any]], serving: int) -> str:
    """Return entries as text, one line each with its reason below."""
    lines = [
        f"{'time':19} {'kind':9} {'version':>7} {'moves':>6} {'MB':>9} {'s':>7} {'predicted':>9} {'measured':>9}"
    ]
    for entry in entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
        gains = " ".join(f"{_part(entry.get(name)):>9}" for name in ("predicted_gain", "measured_gain"))
        lines.append(
            f"{when} {entry['kind']:9} {entry.get('version', ''):>7} {entry.get('moves', 0):6} "
            f"{entry.get('bytes', 0) / 1e6:9.1f} {entry.get('seconds', 0.0):7.2f} {gains}"
        )
        lines.append(f"    {entry.get('failed') or entry['reason']}")
    return printable("\n".join([*lines, f"placement {serving} serves"]))


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
