"""Claim a rank of a running service for this worker, in a separate process: it needs torch, which a supervisor must not import.

A joining node runs its own torchrun, with its own ranks and store. --join is the address of the service's store. The
engine on the front's node has written there, under a name that is independent of torchrun runs, the prefix under which the
service's ranks meet and the front's address. The front assigns the ranks.

A worker that brings a pool may start before the service, so it waits for it. Any other worker joins a running service.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore

from server.link.messages import Claim, Claimed, PoolClaim
from server.link.rank_link import LinkError, claim
from server.link.seal import SAME_KEY
from server.machine.lines import say
from server.machine.parent_death import die_with_parent
from server.options.checks import read_cluster_key
from server.options.flag import OptionsError
from server.options.pools import Role, pool_to_text
from server.serve.store.signed_store import SignedStore, UnsignedError

SERVICE_KEY = "wideep/service"
STORE_TIMEOUT_S = 20.0
PLACE_TIMEOUT_S = 60.0  # for the service to notice that a node has just gone
SERVICE_TIMEOUT_S = (
    600.0  # for a service that starts together with this torchrun; torchrun waits as long for nodes
)
RETRY_S = 0.5


class ClaimError(RuntimeError):
    """The service has no free rank for this worker; the message gives the reason."""


class NoServiceError(ClaimError):
    """No service answers at the endpoint. It may be starting."""


def run_claim(words: Sequence[str]) -> int:
    """Print the worker's place as JSON. The arguments are HOST:PORT of the service's store, the cluster key's file or "", and
    the fields of `Claim`, those of `PoolClaim` last."""
    die_with_parent()
    endpoint, key_file, node, local_rank, num_ranks, *pool = words
    try:
        key = read_cluster_key(Path(key_file)) if key_file else None
        service = await_service(
            lambda: find_service(endpoint, key), timeout_s=SERVICE_TIMEOUT_S if pool else 0.0
        )
        asked = Claim(node, int(local_rank), int(num_ranks), _pool_claim(pool) if pool else None)
        address, token = service["front"]["ranks_address"], service["front"]["token"]
        timeout_s = PLACE_TIMEOUT_S if pool else STORE_TIMEOUT_S  # a front that starts answers late
        given = await_place(lambda: claim(address, token, asked, timeout_s, cluster_key=key))
    except (ClaimError, LinkError, OptionsError) as error:
        say(f"cannot join the service at {endpoint}: {error}", error=True)
        return 1
    assert given.pool is not None, "a rank has a pool"
    answer = {
        **{name: getattr(given, name) for name in ("rank", "world_size", "num_restarts")},
        "pool": pool_to_text(given.pool),
        **{name: service[name] for name in ("run_id", "restarts", "front")},
    }
    print(json.dumps(answer))
    return 0


def _pool_claim(words: Sequence[str]) -> PoolClaim:
    name, role, run, rank, num_ranks = words
    return PoolClaim(name, Role(role), run, int(rank), int(num_ranks))


def publish_service(store: Store, front: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Write the entry that joining nodes need to the job's store."""
    run_id, restarts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    said = {"run_id": run_id, "restarts": restarts, "front": front}
    store.set(SERVICE_KEY, json.dumps(said))


def find_service(endpoint: str, key: bytes | None) -> dict[str, Any]:
    """Read a service's entry from its store.

    Raises:
        ClaimError: No store answers there, it is not a service's store, or its cluster key differs.
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
            raise NoServiceError(
                "a store answers, but it has no service; check that the address is the service's --rdzv-endpoint"
            )
        signed = store if key is None else SignedStore(store, key)
        return dict(json.loads(signed.get(SERVICE_KEY)))
    except UnsignedError as error:
        raise ClaimError(str(error)) from error
    except ValueError as error:  # the value begins with a signature
        raise ClaimError(f"the service has a cluster key, but this node does not; {SAME_KEY}") from error
    except dist.DistError as error:
        said = str(error).splitlines()[0]
        raise NoServiceError(f"no store answers within {STORE_TIMEOUT_S:g} s ({said})") from error


def await_service(
    find: Callable[[], dict[str, Any]],
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Look for a service until there is one.

    Raises:
        ClaimError: There was none in time, or it cannot be joined.
    """
    until_s = clock() + timeout_s
    while True:
        try:
            return find()
        except NoServiceError:
            if clock() >= until_s:
                raise
        pause(RETRY_S)


def await_place(
    ask: Callable[[], Claimed],
    *,
    timeout_s: float = PLACE_TIMEOUT_S,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> Claimed:
    """Repeat a claim until a rank is free.

    Raises:
        ClaimError: No rank was free in time, or the claim was refused for good.
    """
    until_s = clock() + timeout_s
    while True:
        answer = ask()
        if not answer.refusal:
            return answer
        if not answer.may_come or clock() >= until_s:
            raise ClaimError(answer.refusal)
        pause(RETRY_S)
