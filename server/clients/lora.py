"""`wideep lora`: list the adapters of a service, load one, or unload one."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from server.http.client import ANSWER_TIMEOUT_S, ServiceClient, ServiceError, api_key_of
from server.machine.lines import printable

LIST, LOAD, UNLOAD = "list", "load", "unload"
# Above the service's limit for its ranks (`LOAD_TIMEOUT_S`), because it also reads the files and informs the other fronts.
LOAD_ANSWER_TIMEOUT_S = 900.0


def run_lora(
    args: argparse.Namespace,
    *,
    environment: Mapping[str, str] = os.environ,
    client: ServiceClient | None = None,
) -> int:
    """Load or unload an adapter if one is given, then show all. Return 0, or 1 if the service refuses."""
    timeout_s = LOAD_ANSWER_TIMEOUT_S if args.action == LOAD else ANSWER_TIMEOUT_S
    try:
        with client or ServiceClient(
            args.url, api_key_of(environment), answer_timeout_s=timeout_s
        ) as service:
            if args.action == LOAD:
                fields = {"lora_name": args.name, "lora_path": args.path, "load_inplace": args.replace}
                # Without `pinned`, a replaced adapter keeps its pin.
                service.post("/v1/load_lora_adapter", {**fields, **({"pinned": True} if args.pin else {})})
            elif args.action == UNLOAD:
                service.post("/v1/unload_lora_adapter", {"lora_name": args.name})
            found = service.get_json("/adapters")
        print(json.dumps(found) if args.json else printable("\n".join(_lines(found))))
    except (ServiceError, LookupError) as error:
        why = (
            error if isinstance(error, ServiceError) else f"{args.url} did not return the adapters of WideEP"
        )
        print(f"wideep lora: {why}", file=sys.stderr)
        return 1
    return 0


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a response of GET /adapters."""
    adapters = found["adapters"]
    if not adapters:
        yield f"no adapter is loaded; up to {found['max_loras']} can be used at once"
    width = max((len(each["name"]) for each in adapters), default=0)
    for each in adapters:
        yield (
            f"{each['name']:{width}}  {each['state']:10}  {each['running']} running, {each['requests']} so far, "
            f"{each['bytes'] / 2**20:.1f} MiB per rank  {each['path']}"
        )
