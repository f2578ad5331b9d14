"""Clients of one service, and their observations during injected faults.

Each answer is compared with the answer to the same request before the first fault.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.links import connections, cut
from benchmarks.faults.orders import FaultOrders
from benchmarks.faults.outcomes import FaultOutcome, left_behind, line_of, spread, summarise
from benchmarks.serving.live_answers import LiveAnswer, LostAnswerError, Said, longest_pause_s
from benchmarks.serving.processes import command_of, pss_bytes
from benchmarks.serving.service import HOST, BenchServiceError, Server
from server.serve.store.rendezvous import listens_on
from server.tools.bench.figures import percentile

Fault = Callable[["Campaign"], Awaitable[int]]  # injects the fault; returns how many members it removes

RECOVERY_TIMEOUT_S = 240.0  # for engines that load on a busy machine
SETTLE_S = 20.0  # for tiers that still copy blocks after the last answer
MOST_PAUSE_S = 3.0  # of a stream, beyond its usual longest gap, while some rank serves
OWN_MOVE_S = 30.0  # limit of the wait for a rebalance that the service decides itself
REGROUP_S = 5.0  # limit of the wait for a new epoch
_SALTED = 0.5  # share of the requests that find no cached prefix
_POLL_S = 0.02
_COUNTERS = {  # a name in the result -> a metric and a part of its labels
    "moves": ("wideep:request_moves_total", ""),
    "hand_overs": ("wideep:request_moves_total", 'cause="hand_over"'),
    "accepted_drafts": ("vllm:spec_decode_num_accepted_tokens_total", ""),
    "tier_faults": ("wideep:kv_tier_faults_total", ""),
}
_SEMAPHORE = "sem.mp-"  # of multiprocessing: used by concurrent tests, not by the service


class LeftOutError(Exception):
    """A fault cannot be injected in this campaign. The message has the reason."""


class Campaign:
    """The clients of one service, and the faults injected into it."""

    def __init__(
        self,
        service: Server,
        bodies: Sequence[dict[str, Any]],
        *,
        num_ranks: int,
        num_open: int,
        drawn: random.Random,
        orders: FaultOrders,
        outages: Sequence[str] = (),
        most_pause_s: float = MOST_PAUSE_S,
    ) -> None:
        """Send no request before `run`.

        Args:
            orders: Orders to the processes of the service.
            outages: Kinds of faults during which no rank serves, so that streams may pause longer.
            most_pause_s: Limit of the pause of a stream, beyond its usual longest gap, while some rank serves.
        """
        self.service, self.bodies, self.num_ranks, self.num_open = service, bodies, num_ranks, num_open
        self.drawn, self.orders, self._outages = drawn, orders, outages
        self._most_pause_s = most_pause_s
        self.pools: dict[str, list[int]] = {}  # ranks by name
        self._gaps_s: list[float] = []  # of streams before faults
        self._first_s: list[float] = []  # waits for the first piece of a stream
        self.outcomes: list[FaultOutcome] = []
        self.left_out: dict[str, str] = {}  # a kind of fault -> the reason
        self._counted = dict.fromkeys(_COUNTERS, (0.0, 0.0))  # of earlier fronts, and of this one
        self.problems: list[str] = []  # lost or changed answers
        self.num_answers = self.num_lost = self.num_changed = self.num_refused = 0
        self._killed: set[int] = set()  # pids of engines
        self._expected: list[Said] = []
        self.num_cut_off = 0  # answers that were requested again
        self.front_is_away = False  # by a fault: clients that are cut off retry with the same key
        self._open: dict[int, LiveAnswer] = {}  # by client
        self._asked: list[
            LiveAnswer
        ] = []  # during the current fault, and those that were open at its beginning
        self._is_over = False
        self._struck_s: float | None = None  # time of the first signal of the current fault

    async def run(self, faults: Iterable[tuple[str, Fault]], *, most: int | None = None) -> dict[str, Any]:
        """Inject faults, given with their names, one after the other under load. Return figures.

        Args:
            most: Stop after this number of faults. A kind that is left out once is not tried again.
        """
        found = json.loads(await self._ask("GET", "/pools"))["pools"]
        self.pools = {each["name"]: each["ranks"] for each in found}
        for body in self.bodies:
            self._expected.append(
                await LiveAnswer(port=self.service.port, body=body, is_streamed=False).read()
            )
        await self.apply_plan()  # the first plan loads the planner, which stays in memory
        before = await self._footprint()
        clients = [asyncio.create_task(self._client(number)) for number in range(self.num_open)]
        for kind, fault in faults:
            if kind in self.left_out:
                continue
            try:
                self.outcomes.append(await self._suffer(kind, fault, clients))
                print(f"   {len(self.outcomes):3} {line_of(self.outcomes[-1])}", flush=True)
            except LeftOutError as reason:
                self.left_out[kind] = str(reason)
                print(f"       {kind}: left out, because {reason}", flush=True)
            await self._count()
            if len(self.outcomes) == most:
                break
        self._is_over = True
        await asyncio.gather(*clients)
        after = await self._settled_footprint()
        await self._count()
        return self._result(before, after)

    def _result(self, before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
        """Return all figures. `before` and `after` are the footprints."""
        flips = self.orders.flips
        most_s = self._most_pause_s + (percentile(self._gaps_s, 99) if self._gaps_s else 0.0)
        # Of streams while some rank serves.
        pauses_s = {kind: times for kind, times in self._pauses().items() if kind not in self._outages}
        waits_s = [each for times in pauses_s.values() for each in times]
        return {
            "faults": len(self.outcomes),
            "left_out": self.left_out,
            "load": spread([each.load for each in self.outcomes]),
            "waits_s": spread(waits_s),
            "waits_beyond_limit": sum(each > self._most_pause_s for each in waits_s),
            "first_token_s": spread(self._first_s),
            "usual_gaps_s": spread(self._gaps_s),
            "flips": flips.num,
            "unseen_flips": flips.num_unseen,
            "answers": self.num_answers,
            "lost": self.num_lost,
            "changed": self.num_changed,
            "refused": self.num_refused,
            "asked_again": self.num_cut_off,
            "problems": self.problems[:20],
            "kinds": summarise(self.outcomes),
            "most_pause_s": round(most_s, 3),
            "late": {
                kind: num_late
                for kind, times in pauses_s.items()
                if (num_late := sum(each > most_s for each in times))
            },
            **{name: before_restarts + now for name, (before_restarts, now) in self._counted.items()},
            "before": before,
            "after": after,
            "left_behind": left_behind(before, after, num_fronts=len(self.fronts())),
        }

    async def _suffer(self, kind: str, fault: Fault, clients: Sequence[asyncio.Task[None]]) -> FaultOutcome:
        """Inject a fault at a random moment under load and wait until all ranks serve together."""
        await self._wait_until_whole(0)
        await asyncio.sleep(self.drawn.uniform(0.1, 1.0))  # faults occur at any point of a step
        losses = (await self.status())["losses"]
        self._asked = list(self._open.values())
        num_cut_off = {id(each): each.num_cut_off for each in self._asked}
        begun_s, self._struck_s = time.perf_counter(), None
        load = os.getloadavg()[0]
        seen = asyncio.create_task(self._wait_until_missed(losses))
        try:
            num_lost = await fault(self)
        except LeftOutError:
            seen.cancel()
            raise
        begun_s = self._struck_s or begun_s  # a fault that waits for its moment starts with its first signal
        self._gaps_s += [
            after_s - before_s
            for each in self._asked
            if each.is_streamed
            for before_s, after_s in pairwise(each.arrivals_s)
            if after_s < begun_s
        ]
        detected_s = None
        if num_lost and not self.front_is_away:
            await self._wait_for(seen.done, "the loss of a rank")
            detected_s = seen.result()
        whole_s = await self._wait_until_whole(0 if self.front_is_away else losses + num_lost)
        seen.cancel()
        await self._wait_for(
            lambda: all(
                each not in self._open.values() or (each.arrivals_s and each.arrivals_s[-1] > whole_s)
                for each in list(self._asked)
                if each.is_streamed and each.asked_s < whole_s
            ),
            "the next piece of every stream",
        )
        self.front_is_away = False
        if failed := [client for client in clients if client.done()]:
            failed[0].result()  # raises the client's error
        pauses: dict[bool, list[float]] = {False: [], True: []}  # by whether the stream was cut off
        for each in self._asked:
            pause = longest_pause_s(each.arrivals_s, begun_s, whole_s) if each.is_streamed else None
            if pause is not None:
                pauses[each.num_cut_off > num_cut_off.get(id(each), 0)].append(pause)
        return FaultOutcome(
            kind=kind,
            detected_s=None if detected_s is None else detected_s - begun_s,
            whole_s=whole_s - begun_s,
            pauses_s=pauses[False],
            cut_off_s=pauses[True],
            first_tokens_s=[
                wait_s
                for each in self._asked
                if (wait_s := each.first_wait_s) is not None
                and each.asked_s < whole_s
                and each.asked_s + wait_s > begun_s
            ],
            load=load,
        )

    async def _client(self, number: int) -> None:
        """Keep one request open and compare each answer."""
        drawn = random.Random(self.drawn.random())
        while not self._is_over:
            at = drawn.randrange(len(self.bodies))
            salt = {"cache_salt": uuid.uuid4().hex} if drawn.random() < _SALTED else {}
            answer = LiveAnswer(
                port=self.service.port,
                body={**self.bodies[at], **salt},
                is_streamed=drawn.random() < 0.7,
                key=uuid.uuid4().hex,
                may_ask_again=lambda: self.front_is_away,
            )
            self._open[number] = answer
            self._asked.append(answer)
            try:
                said = await answer.read()
            except LostAnswerError as error:
                self.num_lost += 1
                self.problems.append(f"request {at} was lost: {error}")
            else:
                self.num_answers += 1
                if said != self._expected[at]:
                    self.num_changed += 1
                    self.problems.append(f"request {at} got {said.texts}; before: {self._expected[at].texts}")
                if answer.first_wait_s is not None:
                    self._first_s.append(answer.first_wait_s)
            self.num_refused += answer.num_refused
            self.num_cut_off += answer.num_cut_off

    def _pauses(self) -> dict[str, list[float]]:
        """Return the pauses of streams by kind of fault."""
        found: dict[str, list[float]] = defaultdict(list)
        for outcome in self.outcomes:
            found[outcome.kind] += outcome.pauses_s
        return found

    async def drain(self, rank: int, *, undo: bool = False, timeout_s: float = 0.0) -> None:
        """Drain a rank, or undo that. The service refuses to drain its last rank."""
        await self._ask("POST", "/ranks/drain", {"rank": rank, "undo": undo, "timeout_s": timeout_s})

    def begin_fault(self) -> None:
        """Count the pauses of streams from now on. Otherwise they count from the first signal."""
        self._struck_s = self._struck_s or time.perf_counter()

    async def act(self, path: str) -> None:
        """Send a POST that acts on the service."""
        await self._ask("POST", path)

    async def leave(self, count: int) -> None:
        """Send requests and close the connections during the answers."""
        answers = [
            LiveAnswer(port=self.service.port, body=self.drawn.choice(self.bodies), is_streamed=True)
            for _ in range(count)
        ]
        tasks = [asyncio.create_task(answer.read()) for answer in answers]
        while not all(answer.arrivals_s or task.done() for answer, task in zip(answers, tasks, strict=True)):
            await asyncio.sleep(_POLL_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def engines(self) -> dict[int, int]:
        """Return the pids of the running engines by rank."""
        found: dict[int, int] = {}
        for pid in self.service.pids():
            if "engine" in command_of(pid):
                with contextlib.suppress(OSError):  # it has just ended; just before, its environment is empty
                    words = Path(f"/proc/{pid}/environ").read_text().split("\0")
                    found |= {int(word[5:]): pid for word in words if word.startswith("RANK=")}
        return found

    def send(self, number: signal.Signals, *ranks: int) -> None:
        """Send a signal to engines."""
        engines = self.engines()
        self.begin_fault()
        for rank in ranks:
            if number == signal.SIGKILL:
                self._killed.add(engines[rank])
            with contextlib.suppress(ProcessLookupError):
                os.kill(engines[rank], number)

    def kill_any(self) -> None:
        """Kill one of the running engines."""
        pid = self.drawn.choice(sorted(self.engines().values()))
        self._killed.add(pid)
        with contextlib.suppress(ProcessLookupError):  # it has just left
            os.kill(pid, signal.SIGKILL)

    def front(self) -> int:
        """Return the pid of the running front, or of the leading one of several."""
        return self.fronts()[0]

    def fronts(self) -> list[int]:
        """Return the pids of the running fronts, the leading one first."""
        commands = {pid: command_of(pid) for pid in self.service.pids()}
        return sorted(
            (pid for pid, words in commands.items() if "front" in words),
            key=lambda pid: _front_number(commands[pid]),
        )

    def pool_of(self, rank: int) -> list[int]:
        """Return the ranks of a rank's pool."""
        return next(ranks for ranks in self.pools.values() if rank in ranks)

    def cut_links(self, rank: int, others: Sequence[int]) -> bool:
        """Cut the connections between a rank and other processes. Returns whether there were any."""
        pid = self.engines().get(rank)
        found = [] if pid is None else connections(pid, others)
        if pid is not None and found:
            self.begin_fault()
            cut(pid, found)
        return bool(found)

    def some_ranks(self, count: int) -> list[int]:
        """Draw `count` ranks, or all if there are fewer."""
        return self.drawn.sample(range(self.num_ranks), min(count, self.num_ranks))

    async def status(self) -> dict[str, Any]:
        """Return the fault status, once a front is available."""
        path = "/v1/fault_tolerance/status"
        while "losses" not in (status := await self.state("GET", path)):  # 503: the leading front is away
            await asyncio.sleep(_POLL_S)
        return status

    async def state(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a JSON object of the service, once a front is available."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                return dict(json.loads(await self._ask(method, path, body)))
            await asyncio.sleep(_POLL_S)

    async def apply_plan(self) -> None:
        """Request a rebalance of a pool and ignore its result."""
        await self._ask("POST", f"/experts/apply?pool={self.drawn.choice(list(self.pools))}")

    async def wait_for_own_move(self) -> list[int]:
        """Wait until a pool moves experts on its own, and return its ranks.

        Raises:
            LeftOutError: No pool did within a time limit.
        """
        until_s = time.perf_counter() + OWN_MOVE_S
        while time.perf_counter() < until_s:
            for pool, ranks in self.pools.items():
                if json.loads(await self._ask("GET", f"/experts/history?pool={pool}")).get("under_way"):
                    return ranks
            await asyncio.sleep(_POLL_S / 10)
        raise LeftOutError(f"no pool moved experts on its own for {OWN_MOVE_S:g} s")

    async def wait_for_epoch_after(self, epoch: int) -> None:
        """Wait until a pool has regrouped, or for a time limit."""
        until_s = time.perf_counter() + REGROUP_S
        while (await self.status())["epoch"] <= epoch and time.perf_counter() < until_s:
            await asyncio.sleep(_POLL_S)

    async def wait_for_new_engine(self, rank: int, old_pid: int) -> None:
        """Wait until a rank's engine has been restarted."""
        await self._wait_for(
            lambda: self.engines().get(rank, old_pid) != old_pid, f"rank {rank}'s new engine"
        )

    async def wait_for_fronts(self, count: int, *, without: int) -> None:
        """Wait until this many fronts accept connections, without the killed one."""

        def are_there() -> bool:
            fronts = self.fronts()
            are_whole = len(fronts) == count and without not in fronts
            return are_whole and all(listens_on(pid, self.service.port) for pid in fronts)

        await self._wait_for(are_there, "the replacement of a front")

    async def wait_for_end(self, pid: int) -> None:
        """Wait until a process has ended."""
        await self._wait_for(lambda: not Path(f"/proc/{pid}").exists(), f"the end of process {pid}")

    async def _wait_until_missed(self, losses: int) -> float:
        """Return the time at which the service was seen to have lost more ranks than before."""
        while (await self.status())["losses"] <= losses:
            await asyncio.sleep(_POLL_S)
        return time.perf_counter()

    async def _wait_until_whole(self, losses: int) -> float:
        """Return the time at which all ranks were seen to serve together, after `losses` losses since the start."""

        async def is_whole() -> bool:
            engines = self.engines()
            if self._killed & set(engines.values()):  # the front may not have noticed yet
                return False
            if engines.keys() != {*range(self.num_ranks)}:
                return False
            status = await self.status()
            # The service's phase is that of the pool that is closest to serving.
            is_serving = not status["missing"] and all(each["phase"] == "serving" for each in status["pools"])
            return is_serving and status["losses"] >= losses and len(status["members"]) == self.num_ranks

        deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
        while not await is_whole():
            if time.perf_counter() > deadline_s:
                raise BenchServiceError(
                    f"ranks are still missing after {RECOVERY_TIMEOUT_S:g} s: {await self.status()}"
                )
            await asyncio.sleep(_POLL_S)
        return time.perf_counter()

    async def _wait_for(self, is_there: Callable[[], object], what: str) -> None:
        deadline_s = time.perf_counter() + RECOVERY_TIMEOUT_S
        while not is_there():
            if time.perf_counter() > deadline_s:
                raise BenchServiceError(f"timed out after {RECOVERY_TIMEOUT_S:g} s waiting for {what}")
            await asyncio.sleep(_POLL_S)

    async def _settled_footprint(self) -> dict[str, float]:
        """Return the footprint once nothing runs and no tier copies blocks, or after a time limit."""
        until_s = time.perf_counter() + SETTLE_S
        while any((await self._running()).values()) and time.perf_counter() < until_s:
            await asyncio.sleep(_POLL_S)
        return await self._footprint()

    async def figure(self, name: str, label: str = "") -> float:
        """Return the sum of a metric over the rows with a label. 0 if the service does not have it."""
        lines = (await self._ask("GET", "/metrics")).decode().splitlines()
        rows = (line for line in lines if line.partition("{")[0] == name and label in line)
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows)

    async def _count(self) -> None:
        """Read the counters. A new front begins at 0."""
        for name, metric in _COUNTERS.items():
            of_earlier, last = self._counted[name]
            now = await self.figure(*metric)
            self._counted[name] = (of_earlier + last, now) if now < last else (of_earlier, now)

    async def _running(self) -> dict[str, float]:
        """Return the figures that are 0 when nothing runs."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return {name: await self.figure(name) for name in names}

    async def _footprint(self) -> dict[str, float]:
        """Return the figures that must return to their initial values when nothing runs."""
        running = await self._running()
        front, engines = self.front(), self.engines().values()
        return {
            **running,
            "engine_descriptors": max(len(os.listdir(f"/proc/{pid}/fd")) for pid in engines),
            "engines_mb": round(sum(map(pss_bytes, engines)) / 1e6, 1),
            "front_descriptors": len(os.listdir(f"/proc/{front}/fd")),
            "front_mb": round(pss_bytes(front) / 1e6, 1),
            "shared_memory_files": sum(not name.startswith(_SEMAPHORE) for name in os.listdir("/dev/shm")),
            # A front starts its checker of structures with the first request that has one.
            "processes": sum("structure-checker" not in command_of(pid) for pid in self.service.pids()),
        }

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        content = b"" if body is None else json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(HOST, self.service.port, limit=2**24)
        try:
            head = (
                f"{method} {path} HTTP/1.0\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + content)
            return (await reader.read()).partition(b"\r\n\r\n")[2]
        finally:
            writer.close()


def _front_number(words: Sequence[str]) -> int:
    """Return a front's number, from its command line."""
    return int(words[words.index("--front-number") + 1]) if "--front-number" in words else 0
