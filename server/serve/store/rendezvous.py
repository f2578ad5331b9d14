"""A worker's place in the service, from torchrun's variables, and the choice of the node that runs the front.

torchrun (c10d) gives rank 0 to any node, not to the one in the user's command, and puts MASTER_ADDR on rank
0's node (seen with torch 2.13). Users expect HTTP on the node that they named, so the front runs on the node
with the torchrun agent that listens on the rendezvous endpoint's port. The kernel's socket tables show which process listens: two agents on
one host share names and addresses, but a port has one owner. Rejected: comparing host names with the endpoint's, which
cannot distinguish these two and fails behind NAT.
"""

import contextlib
import itertools
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from server.options.pools import Pool, Role, pool_from_text, pool_of
from server.options.table import Options
from server.serve.store.meeting import Endpoint

POOL_VARIABLE = "WIDEEP_POOL"  # the pool that a running service assigned to this torchrun
NODE_VARIABLE = "WIDEEP_NODE"  # for engines: identifies the torchrun that started them
RESTARTS_VARIABLE = "WIDEEP_RESTARTS"  # for engines: number of restarts of this rank's engine
_C10D_PORT = 29400  # torchrun's default for an endpoint without a port
_BACKENDS = ("c10d", "wideep")  # backends with a store in a torchrun agent; the second is `torchrun_backend`
_TORCHRUN = ("torchrun", "torch.distributed.run", "distributed/run.py", "torch.distributed.launch")
_LISTEN = "0A"  # the state LISTEN in /proc/net/tcp


class PlaceError(RuntimeError):
    """The environment from torchrun is incomplete or inconsistent."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's position in the service."""

    rank: int
    world_size: int  # ranks in total
    local_rank: int
    local_world_size: int  # ranks on this node
    master_addr: str
    master_port: int
    pool: Pool | None = None  # as assigned by a running service; None if the options determine it

    def is_alone(self, options: Options) -> bool:
        """Return whether the service has no other nodes, and none may join."""
        return self.world_size == self.local_world_size and not options.has_own_pool

    def pool_in(self, options: Options) -> Pool:
        """Return the pool of this worker's rank.

        Raises:
            OptionsError: --pools has another number of ranks.
        """
        return self.pool or pool_of(options.pools_among(self.world_size), self.rank)


def place_from(environment: Mapping[str, str] = os.environ) -> Place:
    """Read this worker's place from torchrun's variables.

    Raises:
        PlaceError: A variable is missing or wrong; the message names it.
    """
    place = Place(
        rank=_number(environment, "RANK"),
        world_size=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK"),
        local_world_size=_number(environment, "LOCAL_WORLD_SIZE"),
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=_number(environment, "MASTER_PORT"),
        pool=pool_from_text(environment[POOL_VARIABLE]) if POOL_VARIABLE in environment else None,
    )
    if not place.master_addr:
        raise PlaceError(_missing("MASTER_ADDR"))
    if not place.local_rank < place.local_world_size <= place.world_size or place.rank >= place.world_size:
        raise PlaceError(
            f"torchrun's variables contradict each other: RANK={place.rank} WORLD_SIZE={place.world_size} "
            f"LOCAL_RANK={place.local_rank} LOCAL_WORLD_SIZE={place.local_world_size}"
        )
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name)
    if text is None:
        raise PlaceError(_missing(name))
    if not text.isdecimal():
        raise PlaceError(f"{name} is {text!r}, but torchrun sets it to a number")
    return int(text)


def _missing(name: str) -> str:
    return (
        f"{name} is not set: torchrun must start `wideep worker`. On one node, use `wideep serve MODEL`. On several nodes, "
        "run `torchrun --nnodes N --nproc-per-node M --rdzv-backend wideep --rdzv-endpoint HEAD:29400 --no-python "
        "wideep worker MODEL` on each"
    )


def front_host(
    place: Place, agent_pid: int, environment: Mapping[str, str] = os.environ, *, may_grow: bool = False
) -> str | None:
    """Return the host name by which other nodes reach this node if the front runs here, otherwise None.

    Args:
        place: This worker's place.
        agent_pid: Pid of the torchrun agent, this worker's parent.
        environment: The worker's environment, which contains the agent's PET_ variables.
        may_grow: Whether other torchruns may add pools.

    Returns:
        "127.0.0.1" if the service has only one node.

    Raises:
        PlaceError: Other torchruns cannot find this one, because its rendezvous endpoint has no fixed port.
    """
    if place.world_size == place.local_world_size and not may_grow:
        return "127.0.0.1"
    endpoint = rendezvous_endpoint(_command_line(agent_pid), environment)
    if may_grow and (endpoint is None or not endpoint.port):
        raise PlaceError(
            "other torchruns join a service with --pool at its rendezvous endpoint; give torchrun --rdzv-backend wideep "
            "--rdzv-endpoint HEAD:29400, with a name or address of this node that the others can reach"
        )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # not torchrun, so no agent listens
        return place.master_addr if place.rank == place.local_rank else None
    host, port = endpoint or Endpoint(place.master_addr, place.master_port)
    return host if listens_on(agent_pid, port) else None


def find_standby(
    standby: str, place: Place, agent_pid: int, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the host of --standby if its store is on this node, otherwise None.

    Args:
        standby: HOST:PORT.

    Raises:
        PlaceError: This service cannot have a standby.
    """
    command = _command_line(agent_pid)
    backend = _torchrun_value(command, environment, "rdzv-backend")
    if backend != "wideep":
        raise PlaceError(
            f"--standby needs torchrun --rdzv-backend wideep, but the backend is {backend or 'static'!r}; "
            "give that backend on all nodes"
        )
    if place.world_size == place.local_world_size:
        raise PlaceError("--standby names a second node, but this service has only one; leave it out")
    endpoint, found = rendezvous_endpoint(command, environment), Endpoint.parse(standby)
    if endpoint is not None and endpoint.port == found.port:
        raise PlaceError(
            f"--standby is {standby}, which has the port of --rdzv-endpoint; give the second store another port"
        )
    return found.host if listens_on(agent_pid, found.port) else None


def own_address(host: str) -> str:
    """Return the address of this node on its route to another one, which reaches it there.

    Raises:
        PlaceError: No route exists.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, _C10D_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PlaceError(f"cannot find the address of this node that {host} reaches: {error}") from error


def node_name(agent_pid: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return a name that the workers of one run of one torchrun share."""
    run_id, restarts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    return f"{run_id}/{restarts}@{socket.gethostname()}:{agent_pid}"


class Joined(NamedTuple):
    """A rank that a running service assigned to a worker of another torchrun."""

    place: Place
    variables: dict[str, str]  # the same place for the engine, as torchrun's variables
    front: dict[str, str]  # the fronts of the service, as they are announced


class WantedPool(NamedTuple):
    """The pool that a joining torchrun is."""

    name: str
    role: Role
    run: str  # identifies the torchrun; shared by the workers of all its nodes


def wanted_pool(
    options: Options, place: Place, node: str, environment: Mapping[str, str] = os.environ
) -> WantedPool | None:
    """Return the pool of --pool and --role, or None without them.

    Args:
        place: This worker's place in its own torchrun. node: Its `node_name`.
    """
    if not options.has_own_pool:
        return None
    run_id, restarts = (environment.get(f"TORCHELASTIC_{name}", "0") for name in ("RUN_ID", "RESTART_COUNT"))
    has_one_node = place.world_size == place.local_world_size  # its store's address may then be localhost
    run = node if has_one_node else f"{run_id}/{restarts}@{place.master_addr}:{place.master_port}"
    return WantedPool(options.pool_name, options.pool_role, run)


def join_service(
    endpoint: str,
    place: Place,
    node: str,
    command: Sequence[str],
    key_file: str | None,
    pool: WantedPool | None = None,
) -> Joined:
    """Claim a rank of a running service.

    Args:
        endpoint: The service's rendezvous endpoint. place: This worker's place in its own torchrun.
        command: Command that runs `server.serve.store.claim`, which needs torch.
        pool: The pool that this torchrun is. None means that it takes the place of a lost node.

    Raises:
        PlaceError: The service has no rank for this worker; the message gives the reason.
    """
    if pool is None and place.world_size != place.local_world_size:
        raise PlaceError(
            f"--join needs a torchrun of one node; this one has {place.world_size} workers, {place.local_world_size} of "
            "them here. Run one torchrun with --nnodes 1 on each joining node, or name a new pool with --pool"
        )
    words = [endpoint, key_file or "", node, str(place.local_rank), str(place.local_world_size)]
    if pool is not None:
        words += [pool.name, pool.role.value, pool.run, str(place.rank), str(place.world_size)]
    asked = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if asked.returncode:
        said = asked.stderr.strip().splitlines()
        raise PlaceError(said[-1] if said else f"cannot join the service at {endpoint}")
    given = json.loads(asked.stdout)
    host, _, port = endpoint.rpartition(":")
    place = replace(
        place,
        rank=given["rank"],
        world_size=given["world_size"],
        master_addr=host.strip("[]"),
        master_port=int(port),
        pool=pool_from_text(given["pool"]),
    )
    variables = {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": given["run_id"],
        "TORCHELASTIC_RESTART_COUNT": given["restarts"],
        RESTARTS_VARIABLE: str(given["num_restarts"]),
        POOL_VARIABLE: given["pool"],
    }
    return Joined(place, variables, given["front"])


def store_variables(agent_pid: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT of the store on the front's node, or nothing if torchrun's own are right.

    torchrun names a store on rank 0's node. If that node is lost, the others cannot meet without its store. The rendezvous
    endpoint's store works as well, and the service depends on the endpoint's node anyway.
    """
    endpoint = rendezvous_endpoint(_command_line(agent_pid), environment)
    if endpoint is None or not endpoint.port or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    return {"MASTER_ADDR": endpoint.host, "MASTER_PORT": str(endpoint.port)}


def find_agent() -> int:
    """Return the pid of the torchrun above this process: the parent, or an earlier ancestor if a script is in between."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # another user's process may be hidden, or a process has just ended
        while pid > 0:
            if is_torchrun(pid):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])  # state, ppid
    return os.getppid()


def is_torchrun(pid: int) -> bool:
    """Return whether a process is a torchrun, judged by its command line.

    Raises:
        OSError: The process does not exist, or the kernel hides it.
    """
    return any(word.endswith(_TORCHRUN) for word in _command_line(pid))


def rendezvous_endpoint(command: Sequence[str], environment: Mapping[str, str]) -> Endpoint | None:
    """Return the rendezvous endpoint of a torchrun command line if an agent hosts its store, otherwise None (static, etcd)."""
    backend = _torchrun_value(command, environment, "rdzv-backend")
    text = _torchrun_value(command, environment, "rdzv-endpoint")
    return endpoint_of(text) if backend in _BACKENDS and text else None


def endpoint_of(text: str) -> Endpoint:
    """Parse a rendezvous endpoint as torchrun does."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not host:  # a bare host, a bare [IPv6] address
        return Endpoint(text.strip("[]"), _C10D_PORT)
    return Endpoint(host.strip("[]"), int(port))


def _torchrun_value(command: Sequence[str], environment: Mapping[str, str], option: str) -> str:
    """Return the value of torchrun's `--option` or PET_OPTION."""
    return option_value(command, option) or environment.get("PET_" + option.upper().replace("-", "_"), "")


def option_value(command: Sequence[str], option: str) -> str:
    """Return the value of an option in a command line (either spelling, last one wins), or "" if it is absent."""
    value = ""
    spellings = ("--" + option, "--" + option.replace("-", "_"))
    for argument, following in itertools.pairwise([*command, ""]):
        name, equals, attached = argument.partition("=")
        if name in spellings:
            value = attached if equals else following
    return value


def _command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]


def listens_on(pid: int, port: int) -> bool:
    """Return whether process `pid` (of the same user) itself holds a TCP socket that listens on `port`."""
    inodes = _listening_inodes(pid, port)
    if not inodes:
        return False
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # closed in the meantime
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            return True
    return False


def _listening_inodes(pid: int, port: int) -> set[str]:
    """Return the inodes of the sockets that listen on `port` in the network namespace of `pid`."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        for row in path.read_text().splitlines()[1:] if path.exists() else []:
            fields = row.split()  # sl, local address:port (hex), remote, state, ...; the tenth is the inode
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return inodes
