#!/usr/bin/env python3
"""Start this node of a WideEP service, or join it to a running one. All recipes for several nodes run this script.

    node.py start MODEL [FLAGS of `wideep worker`]
    node.py health

`start` becomes a torchrun. The first start of a service is a rendezvous of all nodes, in any order. A node that restarts while
the service runs must join it instead (docs/nodes.md), because a rendezvous would restart the other nodes. So every node except
node 0 first checks whether the service answers. Docker, Kubernetes, systemd and you can therefore use one command for starts and
restarts. With ROLES, each node is a pool with a separate torchrun: node 0 begins the service, and the others join it at every
start. `health` exits with status 0 if /health answers with 200. docs/deploy.md lists the variables.
"""

import http.client
import os
import shlex
import socket
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

ASKS = 3  # a front that was killed is back within seconds
PAUSE_S = 1.0
WAIT_S = 900.0  # for node 0; torchrun waits as long for the other nodes
SAY_EVERY_S = 10.0
KILL_MARGIN_S = 10  # from the timeout of open requests until torchrun kills the workers


def main(words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Run the command. It replaces this process, so that signals reach it."""
    if words == ["health"]:
        sys.exit(0 if answers(f"{service_url(environment)}/health") else 1)
    if len(words) < 2 or words[0] != "start":
        sys.exit("usage: node.py start MODEL [FLAGS], or node.py health")
    command = torchrun(words[1:], environment)
    say(shlex.join(command))
    os.execvp(command[0], command)


def torchrun(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Wait until node 0 listens, and return this node's command."""
    nodes, rank = number(environment, "NODES"), number(environment, "NODE_RANK")
    if rank >= nodes:
        raise SystemExit(f"wideep-node: NODE_RANK is {rank}; of {nodes} nodes it is 0 to {nodes - 1}")
    head = needed(environment, "HEAD")
    endpoint = f"{head}:{number(environment, 'RENDEZVOUS_PORT', 29400)}"
    drain_s = number(environment, "DRAIN_SECONDS", 25)
    worker = ["--no-python", "wideep", "worker", *words, "--port", environment.get("HTTP_PORT", "8000")]
    worker += ["--shutdown-timeout-seconds", str(drain_s), *cluster_key(environment)]
    start = ["torchrun", "--nproc-per-node", str(number(environment, "RANKS_PER_NODE", 1))]
    start += ["--shutdown-timeout", str(drain_s + KILL_MARGIN_S), "--rdzv-backend", "wideep"]
    pool = own_pool(environment, nodes, rank)
    worker += pool
    if rank > 0 and joins(environment, endpoint, is_pool=bool(pool)):
        # A torchrun of one node connects to itself. If its host's name does not resolve, it would wait for minutes.
        start += ["--nnodes", "1", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        return [*start, *worker, "--join", endpoint]
    if pool:
        nodes = 1
        say(f"the service starts with the pool of node 0; the other nodes join at {endpoint}")
    else:
        say(f"node {rank} of {nodes}; the service starts when all {nodes} nodes have reached {endpoint}")
    start += ["--nnodes", str(nodes), "--rdzv-endpoint", endpoint, "--rdzv-conf", f"is_host={int(rank == 0)}"]
    return [*start, "--local-addr", environment.get("LOCAL_ADDRESS") or own_address(head, rank), *worker]


def own_pool(environment: Mapping[str, str], nodes: int, rank: int) -> list[str]:
    """Return the flags for the pool of this node; none without ROLES."""
    roles = (environment.get("ROLES") or "").split()
    if not roles:
        return []
    if len(roles) != nodes:
        raise SystemExit(
            f"wideep-node: ROLES has {len(roles)} roles, but NODES is {nodes}; give each node one"
        )
    return ["--pool", f"{roles[rank]}-{rank}", "--role", roles[rank]]


def joins(environment: Mapping[str, str], endpoint: str, *, is_pool: bool) -> bool:
    """Wait for node 0. Returns whether this node joins: the service already runs, or the node is a pool."""
    host, _, port = endpoint.rpartition(":")
    until_s, said_s = time.monotonic() + WAIT_S, -SAY_EVERY_S
    while (why := why_closed(host, int(port))) is not None:
        if time.monotonic() >= until_s:
            raise SystemExit(f"wideep-node: node 0 did not listen at {endpoint} within {WAIT_S:g} s: {why}")
        if time.monotonic() >= said_s + SAY_EVERY_S:
            say(f"node 0 is missing: nothing answers at {endpoint} ({why}); waiting for it")
            said_s = time.monotonic()
        time.sleep(PAUSE_S)
    if is_pool:
        return True
    for ask in range(ASKS):
        if ask:
            time.sleep(PAUSE_S)
        if answers(f"{service_url(environment)}/ping"):
            say(f"the service at {endpoint} runs; this node joins it")
            return True
    return False


def why_closed(host: str, port: int) -> str | None:
    """Return why no connection can be made, or None if it can."""
    try:
        socket.create_connection((host, port), timeout=2 * PAUSE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def answers(url: str) -> bool:
    """Return whether a URL answers with 200. The server's certificate is not checked."""
    try:
        with urllib.request.urlopen(url, timeout=4, context=ssl._create_unverified_context()):
            return True
    except (OSError, http.client.HTTPException):  # URLError and HTTPError are OSErrors
        return False


def service_url(environment: Mapping[str, str]) -> str:
    """Return the service's URL. A service with HTTPS needs SERVICE_URL."""
    host, port = environment.get("HEAD") or "127.0.0.1", environment.get("HTTP_PORT", "8000")
    return environment.get("SERVICE_URL") or f"http://{host}:{port}"


def own_address(head: str, rank: int) -> str:
    """Return the address at which other nodes reach this one: node 0's name, or the address of this node's route to node 0."""
    if rank == 0:
        return head
    family, _, _, _, address = socket.getaddrinfo(head, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def cluster_key(environment: Mapping[str, str]) -> list[str]:
    """Return the flag for the cluster key. A mounted secret belongs to root or a group, so this user gets a private copy."""
    secret = environment.get("CLUSTER_KEY_SECRET")
    if not secret:
        return []
    try:
        key = Path(secret).read_bytes()
    except OSError as error:
        raise SystemExit(
            f"wideep-node: CLUSTER_KEY_SECRET is {secret!r}, which cannot be read: {error.strerror}"
        ) from error
    copy = Path.home() / ".wideep-cluster.key"
    copy.unlink(missing_ok=True)
    descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key)
    return ["--cluster-key-file", str(copy)]


def needed(environment: Mapping[str, str], name: str) -> str:
    """Read a variable that has no default."""
    value = environment.get(name)
    if not value:
        raise SystemExit(f"wideep-node: {name} is not set; see docs/deploy.md")
    return value


def number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Read a variable that is a number."""
    text = environment.get(name) or ("" if default is None else str(default))
    if not (text.isascii() and text.isdigit()):
        raise SystemExit(f"wideep-node: {name} is {text!r}; it must be a number")
    return int(text)


def say(text: str) -> None:
    """Write a line to the log."""
    print(f"wideep-node: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
