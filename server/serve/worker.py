"""`wideep worker`: torchrun runs it once per rank. It finds the rank's place, checks the start, and supervises the rank."""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace

from server.machine.lines import say
from server.machine.parent_death import die_with_parent
from server.machine.roots import WIDEEP_COMMAND
from server.options.flag import OptionsError
from server.options.pools import Role, rank_pool_sizes
from server.options.table import PER_NODE, Options
from server.serve.children import (
    PARENT_END_SIGNAL,
    StopSignals,
    is_gone,
    kill_if_it_stays,
    raise_descriptor_limit,
)
from server.serve.front_processes import FrontKind
from server.serve.node_fronts import returning_fronts
from server.serve.preflight.checkpoint import with_checkpoint
from server.serve.preflight.checks import check_start, say_notes
from server.serve.preflight.device import choose_device, on_device
from server.serve.preflight.machine import problems_at_start, say_problems
from server.serve.preflight.memory import usable_cores
from server.serve.preflight.model import PreflightError
from server.serve.preflight.tiers import with_hand_over
from server.serve.store.rendezvous import (
    NODE_VARIABLE,
    RESTARTS_VARIABLE,
    Place,
    PlaceError,
    find_agent,
    find_standby,
    front_host,
    is_torchrun,
    join_service,
    node_name,
    own_address,
    place_from,
    store_variables,
    wanted_pool,
)
from server.serve.supervisor import UNDER_SERVE, Commands, Supervisor, report_failure

CLAIM = (*WIDEEP_COMMAND, "claim")
AGENT_GRACE_S = 10.0  # for torchrun to exit by itself after its service is gone


def run_worker(
    options: Options, *, commands: Commands | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Supervise this rank until a stop signal or until a process ends.

    Returns:
        The exit status: 0 after a requested stop, 1 otherwise.
    """
    agent = find_agent()
    parent_fd, agent_fd = os.pidfd_open(os.getppid()), os.pidfd_open(agent)
    die_with_parent(PARENT_END_SIGNAL)  # ends this process while it has no children
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise_descriptor_limit()  # for the engine, and the front
    try:
        place, node = place_from(environment), node_name(agent, environment)
        host, fronts, returning = None, FrontKind.ONLY, None
        if options.join is not None:
            wanted = wanted_pool(options, place, node, environment)
            if wanted is not None and place.local_rank == 0:
                say(f"wideep: joining the service at {options.join} as pool {wanted.name}")
            place, variables, announced = join_service(
                options.join, place, node, CLAIM, options.cluster_key_file, wanted
            )
            options = _in_pool(options, place)
            if options.fronts == PER_NODE and place.local_rank == 0:
                host, fronts = own_address(place.master_addr), FrontKind.FURTHER
                returning = returning_fronts(announced, host)
                if returning is None:
                    say(f"wideep: this node serves no HTTP, because the service has lost no front at {host}")
                    host = None
                elif returning.num_per_node != options.api_server_count:
                    raise PlaceError(
                        f"--api-server-count is {options.api_server_count}, but this node had {returning.num_per_node} fronts; "
                        "use the same flags as on the other nodes"
                    )
        else:
            may_grow = options.has_own_pool
            is_first = place.local_rank == 0
            host = front_host(place, agent, environment, may_grow=may_grow) if is_first else None
            if options.standby is not None:
                standby_host = find_standby(options.standby, place, agent, environment)
                if is_first and host is None and standby_host is not None:
                    host, fronts = standby_host, FrontKind.STANDBY
            variables = store_variables(agent, environment)
            if options.fronts == PER_NODE and is_first and not place.is_alone(options):
                fronts = FrontKind.FURTHER if host is None else FrontKind.LEADING
                host = host or own_address(variables.get("MASTER_ADDR", place.master_addr))
        store_host = variables.get("MASTER_ADDR", place.master_addr)
        options = _prepare(options, place, environment, has_front=host is not None, store_host=store_host)
    except (OptionsError, PlaceError, PreflightError) as error:
        report_failure(str(error), environment)
        return 1
    environment = {**environment, **variables, NODE_VARIABLE: node}
    with StopSignals() as stop_signals:
        supervisor = Supervisor(options, place, commands or Commands(), environment)
        status = supervisor.run(
            host, stop_signals=stop_signals, parent_fd=parent_fd, fronts=fronts, returning=returning
        )
    if supervisor.has_lost_front and UNDER_SERVE not in environment:
        # On a node that is cut off, torchrun waits in its rendezvous for the store's node and handles no signal until the
        # kernel stops retransmitting, after about 15 minutes. Without workers it has nothing left to do.
        with contextlib.suppress(OSError):  # it has ended
            if is_torchrun(agent):  # never kill any other parent
                kill_if_it_stays(agent_fd, grace_s=AGENT_GRACE_S)
    _clear_after_serve(environment)
    return status


def _in_pool(options: Options, place: Place) -> Options:
    """Return options with the pool that a node returns into, if neither --pool nor --pools has it and the pool has one role."""
    pool = place.pool
    if pool is None or pool.role is Role.BOTH or options.has_own_pool or options.pools is not None:
        return options
    return replace(options, pool=pool.name, role=pool.role.value)


def _clear_after_serve(environment: Mapping[str, str]) -> None:
    """Remove the folder of a `wideep serve` that was killed before it could do so."""
    pid, _, directory = environment.get(UNDER_SERVE, "").partition(" ")
    if directory and is_gone(int(pid)):
        shutil.rmtree(directory, ignore_errors=True)


def _prepare(
    options: Options, place: Place, environment: Mapping[str, str], *, has_front: bool, store_host: str
) -> Options:
    """Resolve the model and the threads. One worker per node runs the preflight checks."""
    ranks, is_joining = options.data_parallel_size, RESTARTS_VARIABLE in environment
    if ranks is not None and ranks != place.local_world_size and UNDER_SERVE not in environment:
        raise PlaceError(
            f"--data-parallel-size is {ranks}, but torchrun started {place.local_world_size} workers on this node; "
            "remove the flag: torchrun's --nproc-per-node sets the number of ranks"
        )
    pools = options.pools_among(place.world_size) if place.pool is None else (place.pool,)
    device, given = choose_device(options.device) if UNDER_SERVE not in environment else None, options
    if device is not None:
        options = on_device(with_hand_over(options), device, num_local_ranks=place.local_world_size)
    share = max(1, usable_cores() // place.local_world_size)
    threads = options.engine.threads or share
    options = replace(with_checkpoint(options), data_parallel_size=place.local_world_size).with_engine(
        threads=min(threads, share) if is_joining else threads
    )
    if place.local_rank == 0 and device is not None:  # under serve, serve has checked already
        check_start(
            options,
            pool_sizes=rank_pool_sizes(pools, range(place.rank, place.rank + place.local_world_size)),
            has_front=has_front,
            gpu_bytes=device.free_bytes,
        )
        say(f"wideep: computing on {device.in_words}")
        spans_nodes = not place.is_alone(options) and not _is_this_machine(store_host)
        say_problems(
            problems_at_start(
                options,
                num_ranks=place.local_world_size,
                has_other_nodes=spans_nodes,
                num_served_ranks=place.world_size if has_front else None,
            )
        )
        say_notes(given, options, pools)
    return options


def _is_this_machine(host: str) -> bool:
    """Return whether the host name means that all ranks are on one machine, as with several local torchruns."""
    return host == "localhost" or host.startswith("127.") or host == "::1"
