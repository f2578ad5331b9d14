"""`wideep pools`: show the pools of a service with their roles, or change a role while it serves."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from server.clients.status import counted
from server.http.client import ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable
from server.options.pools import ranks_in_words


def run_pools(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
) -> int:
    """Show the pools, after a change of a role if one is given. Return 0, or 1 if the service refuses."""
    try:
        with client or ServiceClient(args.url, api_key_of(environment)) as service:
            if args.name is None:
                found = service.get_json("/pools")
            else:
                found = service.post("/pools", {"pool": args.name, "role": args.role}).json()
            print(json.dumps(found) if args.json else printable("\n".join(_lines(found))))
    except (ServiceError, LookupError) as error:
        why = error if isinstance(error, ServiceError) else f"{args.url} did not return the pools of WideEP"
        print(f"wideep pools: {why}", file=sys.stderr)
        return 1
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a response of GET /pools."""
    width = max(len(pool["name"]) for pool in found["pools"])
    for pool in found["pools"]:
        ranks = pool["ranks"]
        away = "" if pool["serving"] == len(ranks) else f", {pool['serving']} of {len(ranks)} serve"
        yield (
            f"{pool['name']:{width}}  {pool['role']:7}  {ranks_in_words(ranks)}{away}: {counted(pool['requests'])}, "
            f"{pool['kv_usage']:.0%} of the KV cache in use"
        )
    if found["roles"] == "auto":
        yield "roles follow the load (--pool-roles auto)"
