"""`wideep scale`: change the number of ranks of a running service, and show how it proceeds."""

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable

POLL_S = 0.2  # between two queries of the state


def run_scale(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Resize a service, abort a resize, or show the newest one. Return 0 if the service has the wanted number of ranks."""
    try:
        with client or ServiceClient(args.url, api_key_of(environment)) as service:
            state = _act(service, args, sleep)
    except (ServiceError, LookupError) as error:
        why = error if isinstance(error, ServiceError) else f"{args.url} did not return a state of WideEP"
        print(f"wideep scale: {why}", file=sys.stderr)
        return 1
    print(json.dumps(state) if args.json else printable(_sentence(state)))
    is_wanted = args.ranks is None or state["effective_data_parallel_size"] == args.ranks
    return int(not is_wanted)


def _act(service: ServiceClient, args: argparse.Namespace, sleep: Callable[[float], None]) -> dict[str, Any]:
    if args.abort:
        return dict(service.post("/scale_elastic_ep/abort", {}).json())
    if args.ranks is None:
        return service.get_json("/is_scaling_elastic_ep")
    form = {
        "new_data_parallel_size": args.ranks,
        "drain_timeout": args.drain_timeout,
        "operation_id": args.id or uuid.uuid4().hex[:12],
        "wait": False,
        **({} if args.timeout is None else {"timeout": args.timeout}),
    }
    state = dict(service.post("/scale_elastic_ep", form).json())
    said = ""
    while state["is_scaling_elastic_ep"]:
        doing = f"{state['phase']}: waiting for {state['stage']}" if state["stage"] else state["phase"]
        if doing != said and not args.json:
            print(printable(doing), flush=True)
        said = doing
        sleep(POLL_S)
        state = service.get_json("/is_scaling_elastic_ep")
    return state


def _sentence(state: Mapping[str, Any]) -> str:
    """Describe the service and its newest resize."""
    ranks = f"{state['effective_data_parallel_size']} ranks serve"
    if state["operation_id"] is None:
        return f"{ranks}; there was no resize"
    if state["is_scaling_elastic_ep"]:
        return (
            f"{ranks}; operation {state['operation_id']} is {state['phase']} to "
            f"{state['requested_data_parallel_size']} ranks"
        )
    if state["error"] is not None:
        return f"{ranks}; operation {state['operation_id']} failed after {state['seconds']:.1f} s: {state['error']}"
    return f"{ranks}; the resize took {state['seconds']:.1f} s"
