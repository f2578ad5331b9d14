"""`wideep drain`: move the requests of a rank to the other ranks, and wait until none is left."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from server.clients.status import counted
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable

POLL_S = 0.2  # between two queries of the state


def run_drain(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Drain a rank, or undo a drain. Return 0 if the rank has no requests left (or takes them again), otherwise 1."""
    try:
        with client or ServiceClient(args.url, api_key_of(environment)) as service:
            form = {"rank": args.rank, "undo": args.undo, "timeout_s": 0}
            state = dict(service.post("/ranks/drain", form).json())
            begun_s = clock()
            while not args.undo and state.get("requests") and clock() - begun_s < args.timeout:
                sleep(POLL_S)
                state = _state(service, args.rank)
            return _say(state, args, clock() - begun_s)
    except (ServiceError, LookupError) as error:
        why = error if isinstance(error, ServiceError) else f"{args.url} did not return a state of WideEP"
        print(f"wideep drain: {why}", file=sys.stderr)
        return 1


def _state(client: ServiceClient, rank: int) -> dict[str, Any]:
    """Return the state of a draining rank as POST /ranks/drain does."""
    draining = client.get_json("/v1/fault_tolerance/status")["draining"]
    found = next((each for each in draining if each["rank"] == rank), None)
    if found is None:
        return {"rank": rank, "draining": False}
    return {"rank": rank, "draining": True, "requests": found["requests"]}


def _say(state: Mapping[str, Any], args: argparse.Namespace, seconds: float) -> int:
    """Print the state and return the exit status."""
    num_requests, is_draining = state.get("requests", 0), state["draining"]
    if args.undo:
        text = f"rank {args.rank} takes requests again"
    elif not is_draining:
        text = f"rank {args.rank} is not draining any more: it was lost, or the drain was undone"
    elif num_requests:
        text = (
            f"rank {args.rank} has {counted(num_requests)} left after {seconds:.1f} s, and is still draining"
        )
    else:
        text = f"rank {args.rank} has no requests left after {seconds:.1f} s"
    print(json.dumps(state) if args.json else printable(text))
    is_done = args.undo or (is_draining and not num_requests)
    return int(not is_done)
