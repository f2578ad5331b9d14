"""The engine's end of the stream between a rank and the front, for use from threads.

One thread of gRPC's writes, one of ours reads and calls the callbacks. What the step loop sends while the writer is
busy is merged into the next message, so `send` never waits, a slow front gets fewer and larger messages, and no
order is lost. Knows no engine and no torch. The other end is `ranks`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from expert_placement.placement import Placement
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, PlacementReport
from scheduler.policy.request import RankStats, Request, RequestOutput
from server.link import load_wire, membership_wire, placement_wire, wire
from server.link import ranks_pb2 as pb
from server.link.channel import METADATA_KEY, OPTIONS, bearer
from server.link.ranks_pb2_grpc import FrontStub
from server.link.wire import RankFacts

MAX_PENDING_TOKENS = 1 << 20  # a front this far behind is not coming back
CLOSE_TIMEOUT_S = 2.0  # how long the last message may take


class LinkError(ConnectionError):
    """The front could not be reached, or refused this rank; the message says which and why."""


class RankLink:
    """One rank's stream to the front. Opened once, closed once.

    Callbacks run on the link's reader thread: `on_submit` and `on_abort` hand over and return, `on_stop` means the
    front asks for an orderly end, `on_lost` that the front is gone: at most once, and never after `close` or a stop,
    when that is expected.
    """

    def __init__(
        self,
        address: str,
        token: str,
        facts: RankFacts,
        *,
        on_submit: Callable[[Request], None],
        on_abort: Callable[[str], None],
        on_stop: Callable[[], None],
        on_lost: Callable[[str], None],
        on_prepare: Callable[[Placement], None] = lambda _placement: None,
        on_drop: Callable[[int], None] = lambda _version: None,
        on_regroup: Callable[[Order], None] = lambda _order: None,
    ) -> None:
        self.address = address
        self._token = token
        self._facts = facts
        self._on_submit = on_submit
        self._on_abort = on_abort
        self._on_stop = on_stop
        self._on_lost = on_lost
        self._on_prepare = on_prepare
        self._on_drop = on_drop
        self._on_regroup = on_regroup
        self._placement_reports: list[pb.PlacementReport] = []
        self._membership_words: list[pb.FromRank] = []
        self._changed = threading.Condition()
        self._outputs: list[RequestOutput] = []
        self._num_pending_tokens = 0
        self._stats: RankStats | None = None
        self._load: LoadReport | None = None
        self._experts: ExpertMap | None = None
        self._goodbye: str | None = None  # the reason, once closing
        self._end_writer = False
        self._end_expected = False  # by either side
        self._refusal: str | None = None  # why the stream ended, once it has
        self._welcome = threading.Event()
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None

    def open(self, timeout_s: float) -> None:
        """Connect, introduce this rank and wait until the front has taken it.

        Raises:
            LinkError: no front answered within `timeout_s` seconds, or it refused.
        """
        assert self._channel is None, "a link is opened once"
        deadline_s = time.monotonic() + timeout_s
        self._channel = grpc.insecure_channel(self.address, options=OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise LinkError(f"no front answers at {self.address} within {timeout_s:g} s") from None
        call = FrontStub(self._channel).Attach(
            self._messages(), metadata=((METADATA_KEY, bearer(self._token)),)
        )
        self._reader = threading.Thread(target=self._read, args=(call,), name="rank-link", daemon=True)
        self._reader.start()
        if not self._welcome.wait(max(0.0, deadline_s - time.monotonic())):
            self._shut()
            raise LinkError(f"the front at {self.address} did not take this rank within {timeout_s:g} s")
        if self._refusal is not None:
            self._shut()
            raise LinkError(f"the front at {self.address} refused rank {self._facts.rank}: {self._refusal}")

    def send(self, outputs: list[RequestOutput], stats: RankStats | None = None) -> None:
        """Queue what a step yielded; never blocks. After the link is lost or closed this does nothing."""
        with self._changed:
            if self._end_writer or self._goodbye is not None:
                return
            self._outputs.extend(outputs)
            self._num_pending_tokens += sum(len(output.token_ids) for output in outputs)
            if stats is not None:
                self._stats = stats
            overrun = self._num_pending_tokens > MAX_PENDING_TOKENS
            self._changed.notify()
        if overrun:
            self._lose(f"the front at {self.address} does not read: {MAX_PENDING_TOKENS} tokens are waiting")

    def send_load(self, load: LoadReport) -> None:
        """Queue a load report in place of one that waits: they are counters. Never blocks."""
        with self._changed:
            self._load = load
            self._changed.notify()

    def send_experts(self, experts: ExpertMap) -> None:
        """Queue where the experts are, in place of what waits. Never blocks."""
        with self._changed:
            self._experts = experts
            self._changed.notify()

    def send_placement(
        self, report: PlacementReport, placement: Placement | None = None, expert_bytes: int = 0
    ) -> None:
        """Queue what became of a placement, in order; never blocks. The first report says what serves at the start."""
        with self._changed:
            self._placement_reports.append(placement_wire.report_to_wire(report, placement, expert_bytes))
            self._changed.notify()

    def send_regrouped(self, epoch: int) -> None:
        """Queue that this rank serves in an epoch, behind the outputs queued so far; never blocks."""
        self._send_membership(pb.FromRank(regrouped=pb.Regrouped(epoch=epoch)))

    def send_fault(self, epoch: int, reason: str, *, is_final: bool = False) -> None:
        """Queue that this rank's steps in an epoch broke off, behind the outputs queued so far; never blocks.

        Args:
            is_final: this rank cannot follow the order of that epoch, so that only another one helps.
        """
        self._send_membership(
            pb.FromRank(fault=membership_wire.fault_to_wire(epoch, reason, is_final=is_final))
        )

    def _send_membership(self, word: pb.FromRank) -> None:
        with self._changed:
            self._membership_words.append(word)
            self._changed.notify()

    def close(self, reason: str = "") -> None:
        """Send what is queued, then goodbye with `reason` (empty: asked to stop), and disconnect."""
        with self._changed:
            self._end_expected = True
            if self._goodbye is None:
                self._goodbye = reason
            self._changed.notify()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(CLOSE_TIMEOUT_S)
        self._shut()

    def _messages(self) -> Iterator[pb.FromRank]:
        """Yield to gRPC what is to be written, merged while it was busy."""
        yield pb.FromRank(hello=wire.hello_from(self._facts))
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._end_writer:
                    return
                outputs, stats, goodbye = self._outputs, self._stats, self._goodbye
                load, experts = self._load, self._experts
                self._outputs, self._stats, self._num_pending_tokens = [], None, 0
                self._load = self._experts = None
                reports, self._placement_reports = self._placement_reports, []
                words, self._membership_words = self._membership_words, []
            if outputs or stats:
                yield pb.FromRank(output=wire.step_output_from(outputs, stats))
            yield from words
            if experts is not None:
                yield pb.FromRank(experts=load_wire.experts_to_wire(experts))
            for report in reports:
                yield pb.FromRank(placement=report)
            if load is not None:
                yield pb.FromRank(load=load_wire.load_to_wire(load))
            if goodbye is not None:
                yield pb.FromRank(goodbye=pb.Goodbye(reason=goodbye))
                return

    def _has_news(self) -> bool:
        queued = self._outputs or self._stats or self._load or self._experts or self._placement_reports
        return bool(queued or self._membership_words) or self._goodbye is not None or self._end_writer

    def _read(self, call: Iterator[pb.ToRank]) -> None:
        """Hand the front's messages to the callbacks until the stream ends."""
        reason = "the front closed the stream"
        try:
            for message in call:
                self._take(message)
        except grpc.RpcError as error:
            reason = _explain(error)
        self._lose(reason)

    def _take(self, message: pb.ToRank) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self._on_submit(wire.request_from(message.submit, now_s=time.monotonic()))
        elif kind == "abort":
            self._on_abort(message.abort.request_id)
        elif kind == "stop":
            self._end_expected = True
            self._on_stop()
        elif kind == "prepare":
            self._on_prepare(placement_wire.placement_from(message.prepare.placement))
        elif kind == "drop":
            self._on_drop(message.drop.version)
        elif kind == "regroup":
            self._on_regroup(membership_wire.order_from(message.regroup))
        elif kind == "welcome":
            self._welcome.set()

    def _lose(self, reason: str) -> None:
        """Note the stream's end once; tell the engine unless it closed the link, or never had one."""
        with self._changed:
            first = not self._end_writer
            self._end_writer = True
            welcomed = self._welcome.is_set()
            self._refusal = self._refusal or reason
            self._outputs = []
            self._changed.notify()
        self._welcome.set()
        if first and welcomed and not self._end_expected:
            self._on_lost(reason)

    def _shut(self) -> None:
        with self._changed:
            self._end_writer = True
            self._changed.notify()
        if self._channel is not None:
            with contextlib.suppress(ValueError):  # closed before
                self._channel.close()


def _explain(error: grpc.RpcError) -> str:
    """Say in words how a stream ended: its own detail where the other side gave one."""
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    return f"{details or 'no reason given'} ({code})"
