"""Ranks that may fail and rejoin, each a process with the real step loop, and a fake front.

The fake front runs in the test. It hosts the store, counts epochs, sends orders and requests, resubmits the requests of a
lost rank to another rank with the tokens already delivered, and records every message of the ranks.

    with Crew(checkpoint, 3) as crew:
        crew.submit(0, requests)
        crew.until(lambda: crew.is_done("0"))
"""

import ctypes
import faulthandler
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from expert_placement.placement import Placement
from expert_placement.survivors import surviving
from scheduler.assembly import Assembled, assemble
from scheduler.epochs.heartbeat import MOVES_TO_LEARN, Suspect, Watch
from scheduler.epochs.orders import Order
from scheduler.moves.reports import PlacementReport
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import MemoryOrder, RankStats, Request, RequestOutput
from scheduler.step.groups import StoreDoorbell
from scheduler.weights.versions import (
    CHECKPOINT,
    WeightAction,
    WeightOrder,
    WeightReport,
    WeightState,
    WeightVersion,
)
from tests.support.ranks import GROUP_TIMEOUT_S, PR_SET_PDEATHSIG, rank_context

TIMEOUT_S = 90.0
Prepare = Callable[[Assembled], None]


class Fault(NamedTuple):
    """Message of a rank that waits for an order."""

    epoch: int
    reason: str
    is_final: bool


class End(NamedTuple):
    """What a rank leaves behind when it stops."""

    threads: list[str]
    shared_files: list[str]  # mapped memory of exchanges
    sockets: int  # open sockets besides those to the store
    held_experts: list[list[int]]


class Doom(NamedTuple):
    """Point at which a rank kills itself: within a step, or while it follows an order."""

    steps: int = 0  # completed before it dies
    layer: int = 1
    function: str = ""  # a call of this function, named with its module, kills it
    calls: int = 0  # calls of that function that it survives
    is_stuck: bool = False  # the step hangs instead, once heartbeats have measured the machine's pace


class Crew:
    """A service's ranks as processes. A context manager. `members` are the ranks of the newest order."""

    def __init__(
        self,
        directory: Path,
        world_size: int,
        *,
        dooms: dict[int, Doom] | None = None,
        without_room: Sequence[int] = (),
        heartbeat_timeout_s: float = 0.0,
        prepare: Prepare | None = None,
        **settings: Any,
    ) -> None:
        """Start all ranks.

        Args:
            without_room: Ranks that have no memory to take over experts at first.
            heartbeat_timeout_s: Timeout of the heartbeats and of the watch behind `suspects`. 0 disables heartbeats.
            prepare: Called with the assembled engine in a rank's process.
            settings: Settings of the engines.
        """
        self._prepare = prepare
        self._settings = {"heartbeat_timeout_s": heartbeat_timeout_s, **settings}
        self._directory, self._dooms = directory, dooms or {}
        self._watch = Watch(heartbeat_timeout_s)
        self._watch.begin_epoch(0, range(world_size))
        self._without_room = set(without_room)
        self.world_size, self.members, self.epoch = world_size, tuple(range(world_size)), 0
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, Any] = {}
        self._pipes: dict[int, Connection] = {}
        self.ready: set[int] = set()
        self.lost: list[int] = []
        self.serves: dict[int, int] = {}  # rank: epoch
        self.faults: list[tuple[int, Fault]] = []
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[tuple[int, float]]] = {}  # with the tokens, for requests that want them
        self.ends: dict[str, str] = {}  # finish reasons, by request
        self.stats: dict[int, RankStats] = {}
        self.reports: list[PlacementReport] = []
        self.weight_reports: list[WeightReport] = []
        self.versions: dict[int, WeightVersion] = {}  # that were ordered, by number
        self.weights = WeightOrder(action=WeightAction.SERVE, version=CHECKPOINT)  # the last order to serve
        self.switched: dict[int, int] = {}  # by rank: the memory order that it followed last
        self.read: dict[int, tuple[int, str]] = {}  # by rank: the version that it read ahead, and the problem
        self.left: dict[int, End] = {}
        self._requests: dict[str, tuple[int, Request]] = {}
        self.home: Placement | None = None
        try:
            for rank in range(world_size):
                self.start(rank)
            self.until(lambda: len(self.ready) == world_size)
        except BaseException:  # the caller does not have the object yet
            self.close()
            raise

    def start(
        self, rank: int, *, is_joining: bool = False, placement: Placement | None = None, **settings: Any
    ) -> None:
        """Start a rank's process, which loads its share of the model. `ready` holds the rank once it can serve."""
        context = rank_context()
        ours, theirs = context.Pipe()
        config = {**self._settings, **settings, "rank": rank, "world_size": self.world_size}
        doom = None if is_joining else self._dooms.get(rank)
        has_room = rank not in self._without_room
        prepare = self._prepare
        place = theirs, self.store.port, self._directory, config, is_joining, placement
        arguments = (*place, has_room, doom, prepare)
        process = context.Process(target=_serve_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.processes[rank], self._pipes[rank] = process, ours

    def submit(self, rank: int, requests: Sequence[Request]) -> None:
        """Submit requests to a rank."""
        for request in requests:
            self._requests[request.request_id] = rank, request
            self.tokens.setdefault(request.request_id, [])
            self._send(rank, "submit", request)

    def kill(self, rank: int) -> None:
        """Kill a rank's process and record the loss."""
        self.processes[rank].kill()
        self.until(lambda: rank in self.lost)

    def bring_back(self, *ranks: int) -> None:
        """Restart lost ranks, and wait until they can serve."""
        for rank in ranks:
            self.start(rank, is_joining=True)
        self.until(lambda: self.ready >= set(ranks))

    def order(self, members: Sequence[int], *, to: Sequence[int] | None = None) -> None:
        """Order the next epoch. `to` limits the order to these ranks."""
        assert self.home is not None, "a rank must report its placement before it is ready"
        self.epoch, self.members = self.epoch + 1, tuple(members)
        self._watch.begin_epoch(self.epoch, members)
        placement = surviving(self.home, members).with_version(100 + self.epoch)
        order = Order(self.epoch, self.members, placement, self.weights.version.number)
        for rank in self.members if to is None else to:
            self._send(rank, "order", order)

    def prepare(self, home: Placement) -> None:
        """Start the new ranks of a placement, and let those that stay read their experts."""
        staying, self.world_size = range(min(self.world_size, home.num_ranks)), home.num_ranks
        new = set(range(len(self.members), home.num_ranks))
        for rank in sorted(new):
            self.start(rank, is_joining=True, placement=home)
        for rank in staying:
            self._send(rank, "read", home)
        self.until(lambda: self.ready >= new and self.read.keys() >= {*staying})

    def resize(self, home: Placement) -> None:
        """Order the ranks of a prepared placement to meet. Those beyond it leave, and stop when the others serve."""
        leaving = tuple(range(home.num_ranks, len(self.members)))
        self.home, self.epoch, self.members = home, self.epoch + 1, tuple(range(home.num_ranks))
        self._watch.begin_epoch(self.epoch, self.members)
        placement = home.with_version(100 + self.epoch)
        weights = self.weights.version.number
        order = Order(self.epoch, self.members, placement, weights, home.num_ranks, leaving)
        for rank in (*self.members, *leaving):
            self._send(rank, "order", order)
        self.until(lambda: self.serve_in(self.epoch))
        for rank in leaving:
            self._send(rank, "stop", None)
        self.until(lambda: all(rank in self.left for rank in leaving))

    def suspects(self) -> list[Suspect]:
        """Return the ranks that are stuck according to their heartbeats."""
        return self._watch.suspects(time.monotonic())

    def move(self, target: Placement) -> None:
        """Start a change of placement on all members."""
        for rank in self.members:
            self._send(rank, "move", target)

    def sleep(self, order: MemoryOrder, *, wait: bool = True) -> None:
        """Order all members to change their memory, and wait until they have."""
        for rank in self.members:
            self.tell_memory(rank, order)
        if wait:
            self.until(lambda: all(self.switched.get(rank) == order.number for rank in self.members))

    def tell_memory(self, rank: int, order: MemoryOrder) -> None:
        """Order one rank to change its memory."""
        self._send(rank, "memory", order)

    def order_weights(self, order: WeightOrder, *, to: Sequence[int] | None = None) -> None:
        """Send an order about weights to all members, or to these ranks."""
        self.versions[order.version.number] = order.version
        if order.action is WeightAction.SERVE:
            self.weights = order
        for rank in self.members if to is None else to:
            self._send(rank, "weights", order)

    def weight_states(self, number: int) -> dict[int, WeightState]:
        """Return each rank's last report on a version of the weights."""
        return {each.rank: each.state for each in self.weight_reports if each.number == number}

    def replay(self, lost: int, to: int) -> None:
        """Resubmit a lost rank's open requests with the tokens it had delivered."""
        for key, (rank, request) in list(self._requests.items()):
            if rank == lost and key not in self.ends:
                known = {name: getattr(request, name) for name in ("request_id", "prompt_ids", "params")}
                again = Request(**known, arrival_s=0.0, replayed_ids=tuple(self.tokens[key]))
                self._requests[key] = to, request
                self._send(to, "submit", again)

    def abort(self, request_id: str) -> None:
        self._send(self._requests[request_id][0], "abort", request_id)

    def is_done(self, *keys: str) -> bool:
        """Return whether these requests have ended. Without keys, check all requests."""
        return all(key in self.ends for key in keys or self._requests)

    def has_begun(self) -> bool:
        """Return whether every request has a token."""
        return all(self.tokens.values())

    def serve_in(self, epoch: int) -> bool:
        """Return whether all members serve in an epoch."""
        return all(self.serves.get(rank) == epoch for rank in self.members)

    def stop(self) -> None:
        """Stop all members in an orderly way, and collect what they leave behind."""
        for rank in self.members:
            self._send(rank, "stop", None)
        self.until(lambda: all(rank in self.left for rank in self.members))

    def until(self, is_true: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        """Process messages of the ranks until the condition holds. Fail if only heartbeats arrive for `timeout_s`."""
        heard_s = time.monotonic()
        while not is_true():
            ranks = {pipe: rank for rank, pipe in self._pipes.items()}
            ready = wait(list(ranks), timeout=timeout_s)
            heard = [self._take(ranks[pipe]) for pipe in ready]  # type: ignore[index]
            if any(heard):
                heard_s = time.monotonic()
            assert time.monotonic() - heard_s < timeout_s, f"no message arrived; {vars(self)}"

    def close(self) -> None:
        """Kill every process."""
        for process in self.processes.values():
            process.kill()
            process.join(10)
        for pipe in self._pipes.values():
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, rank: int, verb: str, what: Any) -> None:
        self._pipes[rank].send((verb, what))

    def _take(self, rank: int) -> bool:
        """Process one message of a rank. Return False for a heartbeat."""
        try:
            verb, what = self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self._pipes.pop(rank).close()
            self.processes[rank].join(10)
            self.ready.discard(rank)
            self.serves.pop(rank, None)
            self.switched.pop(rank, None)
            self.lost.append(rank)
            return True
        if verb == "heartbeat":
            self._watch.take(what, time.monotonic())
            return False
        if verb == "ready":
            self.ready.add(rank)
            self.home = self.home or what
        elif verb == "step":
            outputs, self.stats[rank] = what
            for output in outputs:
                self._note(output)
        elif verb == "fault":
            self.faults.append((rank, what))
        elif verb == "regrouped":
            self.serves[rank] = what
        elif verb == "report":
            self.reports.append(what)
        elif verb == "weights":
            self.weight_reports.append(what)
        elif verb == "switched":
            self.switched[rank] = what
        elif verb == "read":
            self.read[rank] = what
        else:
            self.left[rank] = what
        return True

    def _note(self, output: RequestOutput) -> None:
        assert output.request_id not in self.ends, f"{output.request_id} has output after its end"
        self.tokens[output.request_id] += output.token_ids
        rows = [(each.token_id, each.logprob) for each in output.logprobs]
        self.logprobs.setdefault(output.request_id, []).extend(rows)
        if output.finish_reason is not None:
            self.ends[output.request_id] = output.finish_reason.value + output.error


def _serve_rank(
    pipe: Connection,
    port: int,
    directory: Path,
    config: dict[str, Any],
    is_joining: bool,
    placement: Placement | None,
    has_room: bool,
    doom: Doom | None,
    prepare: Prepare | None,
) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    threads = {thread.name for thread in threading.enumerate()}
    connections = [TCPStore("127.0.0.1", port, None, False, wait_for_workers=False) for _ in range(4)]
    sockets = _sockets()
    if not is_joining and config["world_size"] > 1:
        dist.init_process_group(
            "gloo", store=PrefixStore("group", connections[0]), rank=config["rank"],
            world_size=config["world_size"], timeout=timedelta(seconds=GROUP_TIMEOUT_S),
        )  # fmt: skip
    room = iter([] if has_room else [0])
    built = assemble(
        EngineConfig(**{"directory": directory, "kv_cache_bytes": 8 << 20, "max_model_len": 320, **config}),
        StoreDoorbell(connections[1], connections[2]),
        store=connections[3],
        is_joining=is_joining,
        placement=placement,
        available=lambda: next(room, 1 << 40),
    )
    if prepare is not None:
        prepare(built)
    _run(built, pipe, doom)
    built.engine.close()
    built.engine.close()  # may be called twice
    remaining = sorted(t.name for t in threading.enumerate() if t.name not in {*threads, "commands"})
    held: Any = built.engine._epochs
    pipe.send(("end", End(remaining, _shared_files(), _sockets() - sockets, held._regrouping._held)))


def _run(built: Assembled, pipe: Connection, doom: Doom | None) -> None:
    engine, sending = built.engine, threading.Lock()

    def say(verb: str, what: Any) -> None:
        with sending:
            pipe.send((verb, what))

    engine.tell_membership(
        lambda epoch, reason, *, is_final=False: say("fault", Fault(epoch, reason, is_final)),
        lambda epoch: say("regrouped", epoch),
        lambda beat: say("heartbeat", beat),
    )
    built.relocation.on_report = lambda report: say("report", report)
    engine.memory.on_switched = lambda number: say("switched", number)
    engine.weights.on_report = lambda report: say("weights", report)
    built.read_ahead.on_read = lambda version, problem: say("read", (version, problem))
    if doom is not None:
        _doom(built, doom)
    say("ready", built.relocation.placement)
    verbs: dict[str, Callable[[Any], None]] = {
        "submit": engine.submit, "abort": engine.abort, "order": engine.regroup,
        "move": built.relocation.prepare, "memory": engine.memory.order, "weights": engine.weights.order,
        "read": lambda home: built.read_ahead.begin(home, built.relocation.place),
        "stop": lambda _: engine.stop(),
    }  # fmt: skip

    def take() -> None:
        verb = ""
        while verb != "stop":
            try:
                verb, what = pipe.recv()
            except (EOFError, OSError):
                return
            verbs[verb](what)

    threading.Thread(target=take, name="commands", daemon=True).start()
    engine.run(lambda outputs, stats: say("step", (outputs, stats)))


def _doom(built: Assembled, doom: Doom) -> None:
    """Make the rank kill itself."""
    if doom.function:
        owner, _, name = doom.function.rpartition(".")
        true, calls = getattr(pkgutil.resolve_name(owner), name), count()

        def call_or_die(*arguments: Any, **options: Any) -> Any:
            if next(calls) >= doom.calls:
                os.kill(os.getpid(), signal.SIGKILL)
            return true(*arguments, **options)

        setattr(pkgutil.resolve_name(owner), name, call_or_die)
        return
    layer: Any = built.model.layers[doom.layer]
    run = layer.run

    heart = built.engine._heart

    def run_or_die(*arguments: Any) -> Any:
        if doom.is_stuck and heart._num_moves >= MOVES_TO_LEARN:
            threading.Event().wait()
        if not doom.is_stuck and built.runner.figures.steps >= doom.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments)

    layer.run = run_or_die


def _sockets() -> int:
    links = (os.readlink(f"/proc/self/fd/{name}") for name in _descriptors())
    return sum(link.startswith("socket:") for link in links)


def _descriptors() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]


def _shared_files() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[-1] for line in lines if "wideep-dispatch" in line})
