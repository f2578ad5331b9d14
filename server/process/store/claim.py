"""Ask a running service which rank this worker is: a process of its own, because it needs torch and a supervisor has none.

A node that joins runs its own torchrun, whose ranks and store are its own. The service's store is at the address that --join
gives. There the engine beside the front has left, under a name that no run of torchrun changes, below which prefix the
service's ranks meet and where its front listens. The front gives out the ranks.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from server.lines import say
from server.link.messages import Claim, Claimed
from server.link.rank_link import LinkError, claim
from server.link.seal import SAME_KEY
from server.options.checks import read_cluster_key
from server.options.flag import OptionsError
from server.parent_death import die_with_parent
from server.process.store.signed_store import SignedStore, UnsignedError

SERVICE_KEY = "wideep/service"
STORE_TIMEOUT_S = 20.0
PLACE_TIMEOUT_S = 60.0  # for a node to be missed that has gone a moment ago
RETRY_S = 0.5


class ClaimError(RuntimeError):
    """There is no place for this worker; the message says why."""


def run_claim(words: Sequence[str]) -> int:
    """Print the worker's place as JSON; the arguments are HOST:PORT of the service's store, the claim's fields, and
    the cluster key's file if there is one."""
    die_with_parent()
    endpoint, node, local_rank, num_ranks, *key_file = words
    try:
        key = read_cluster_key(Path(key_file[0])) if key_file else None
        service = find_service(endpoint, key)
        asked = Claim(node, int(local_rank), int(num_ranks))
        address, token = service["front"]["ranks_address"], service["front"]["token"]
        given = await_place(lambda: claim(address, token, asked, STORE_TIMEOUT_S, cluster_key=key))
    except (ClaimError, LinkError, OptionsError) as error:
        say(f"cannot join the service at {endpoint}: {error}", error=True)
        return 1
    print(json.dumps({**given._asdict(), "run_id": service["run_id"], "restarts": service["restarts"]}))
    return 0


def publish_service(store: Store, front: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Leave in the job's store what a node that joins must know."""
    run_id, restarts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    said = {"run_id": run_id, "restarts": restarts, "front": front}
    store.set(SERVICE_KEY, json.dumps(said))


def find_service(endpoint: str, key: bytes | None) -> dict[str, Any]:
    """Read what a service's store says of it.

    Raises:
        ClaimError: nothing answers there, or it is no service's store.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        store = TCPStore(
            host.strip("[]"),
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
        )
        if not store.check([SERVICE_KEY]):
            raise ClaimError(
                "a store answers there, but no service has begun in it; give its --rdzv-endpoint"
            )
        signed = store if key is None else SignedStore(store, key)
        return dict(json.loads(signed.get(SERVICE_KEY)))
    except UnsignedError as error:
        raise ClaimError(str(error)) from error
    except ValueError as error:  # what a signature begins with
        raise ClaimError(f"the service has a cluster key, and this node has none; {SAME_KEY}") from error
    except dist.DistError as error:
        said = str(error).splitlines()[0]
        raise ClaimError(f"nothing answers there within {STORE_TIMEOUT_S:g} s ({said})") from error


def await_place(
    ask: Callable[[], Claimed],
    *,
    timeout_s: float = PLACE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Claimed:
    """Ask until there is a place.

    Raises:
        ClaimError: there is none, and none became free in time.
    """
    until_s = clock() + timeout_s
    while True:
        answer = ask()
        if not answer.refusal:
            return answer
        if not answer.may_come or clock() >= until_s:
            raise ClaimError(answer.refusal)
        pause(RETRY_S)
