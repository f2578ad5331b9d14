"""`wideep status`: which ranks of a running service serve, which are missing and why, KV tiers, and what happened last."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable
from server.options.pools import ranks_in_words

NUM_EVENTS = 5  # shown


def run_status(args: argparse.Namespace, *, environment: Mapping[str, str] = os.environ) -> int:
    """Print the status. Return 0 while the service serves, and otherwise 1."""
    try:
        with ServiceClient(args.url, api_key_of(environment)) as client:
            status = client.get_json("/v1/fault_tolerance/status")
            print(json.dumps(status) if args.json else printable("\n".join(_lines(status))))
    except (ServiceError, LookupError) as error:
        why = error if isinstance(error, ServiceError) else f"{args.url} did not return a status of WideEP"
        print(f"wideep status: {why}", file=sys.stderr)
        return 1
    return int(status["phase"] != "serving")


def counted(num_requests: int) -> str:
    """Return a number of requests as text."""
    return f"{num_requests or 'no'} request{'' if num_requests == 1 else 's'}"


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a response of GET /v1/fault_tolerance/status."""
    members = status["members"]
    yield f"{status['phase']}: {len(members)} of {status['total_engines']} ranks serve, epoch {status['epoch']}"
    pools = status.get("pools", ())
    for each in pools if len(pools) > 1 else ():
        ranks = each["ranks"]
        yield (
            f"pool {each['pool']} ({each['role']}, {ranks_in_words(ranks)}): {each['phase']}, {len(each['members'])} of {len(ranks)} serve, "
            f"epoch {each['epoch']}"
        )
    for each in status["missing"]:
        yield f"rank {each['rank']} is missing for {each['seconds']:.0f} s: {each['reason']}"
    for each in status["faults"]:
        yield f"rank {each['rank']} waits after a fault: {each['reason']}"
    for each in status["draining"]:
        yield f"rank {each['rank']} is draining for {each['seconds']:.0f} s: {counted(each['requests'])} left"
    if (resize := status.get("resize", {})).get("is_scaling_elastic_ep"):
        size = resize["requested_data_parallel_size"]
        waits = f", waits for {resize['stage']}" if resize["stage"] else ""
        yield f"operation {resize['operation_id']} resizes the service to {size} ranks: {resize['phase']}{waits}"
    if (sleep := status.get("sleep", {"level": 0}))["level"]:
        how = "is waking up" if sleep["waking"] else f"sleeps at level {sleep['level']}"
        yield f"the service {how}, and has refused requests for {sleep['seconds']:.0f} s"
    losses = status["losses"]
    yield (
        f"since the start: {losses} rank {'loss' if losses == 1 else 'losses'}, {counted(status['replays'])} continued on another rank; "
        f"{counted(status['waiting_requests'])} waiting for a rank"
    )
    for each in status.get("tiers", ()):
        yield f"KV tiers of {each['host']}: {', '.join(_tiers(each))}"
    for each in status["events"][-NUM_EVENTS:]:
        yield f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each['time']))}  {each['text']}"


def _tiers(node: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of a node's line."""
    for tier, name in (("host", "memory"), ("disk", "disk")):
        if capacity := node[f"{tier}_capacity_bytes"]:
            used, hits = node[f"{tier}_bytes"], node[f"{tier}_hit_tokens"]
            is_off = tier == "disk" and node["is_disk_off"]
            off = "; disabled after an error, until the next start" if is_off else ""
            yield f"{name} {_gib(used)} of {_gib(capacity)} GiB ({hits:,} prompt tokens found{off})"
    if node.get("peer_hit_tokens"):
        yield f"{node['peer_hit_tokens']:,} prompt tokens from other nodes"
    yield f"{node['faults']} damaged and {node['dropped']} dropped blocks"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"
