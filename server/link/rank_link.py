"""The engine's end of the stream between a rank and the front, for use from threads.

A gRPC thread writes; a thread of this module reads and passes messages on. Messages that the step loop sends while the
writer is busy are merged into the next one, so `send` never blocks, a slow front gets fewer and larger messages, and the
order is kept. Independent of engine and torch. The other end is `ranks`.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

import grpc

from scheduler.epochs.orders import by_rank
from server.link.image_rows import ArrivingRows
from server.link.messages import (
    DEFINITION,
    DEFINITION_KEY,
    METHOD,
    OPTIONS,
    SENT_FIRST,
    SENT_LAST,
    SERVICE,
    TOKEN_KEY,
    Claim,
    Claimed,
    FromRank,
    Goodbye,
    RankFacts,
    ReturnOf,
    ReturnTo,
    RowsPart,
    StepOutput,
    Stop,
    Submit,
    ToRank,
    Welcome,
    bearer,
    decode,
    encode,
)
from server.link.pool_numbers import to_pool, to_service
from server.link.seal import NONCE_KEY, SAME_KEY, Seal, SealError, make_nonce

MAX_PENDING_TOKENS = 1 << 20  # the front is lost if it is this far behind
CONNECT_TIMEOUT_S = 20.0  # the front listens before its address is published
RETRY_S = 0.05
_REFUSALS = (  # status codes with which a front refuses a rank; after any other, a retry may succeed
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.ALREADY_EXISTS,
)
CLOSE_TIMEOUT_S = 2.0  # for sending the last message


class LinkError(ConnectionError):
    """The front could not be reached, or refused this rank; the message has the reason."""


class RefusedError(LinkError):
    """The front refuses this rank."""


class FrontLost(NamedTuple):
    """The end of the stream; received at most once, and never after `close` or a stop."""

    reason: str
    # Whether the connection broke, as at the end of the front's process. Otherwise the front closed the stream, or one of its
    # messages was invalid.
    is_broken: bool


class RankLink:
    """One rank's stream to the front. Opened once, closed once."""

    def __init__(
        self,
        address: str,
        token: str,
        facts: RankFacts,
        receive: Callable[[ToRank | FrontLost], None],
        *,
        pool: range | None = None,
        cluster_key: bytes | None = None,
    ) -> None:
        """Prepare a stream.

        Args:
            receive: Called with each message of the front on the reader thread; must return quickly.
            pool: The ranks of this rank's pool, as the service counts them. None: all ranks of the service.
        """
        self.address, self._handshake = address, Handshake(cluster_key)
        self._token, self._facts, self._receive = token, facts, receive
        self._pool = pool or range(facts.world_size)
        # Called before the front's first order is received.
        self.on_welcome: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._newest: dict[type, Any] = {}  # pending messages of SENT_FIRST and SENT_LAST
        self._in_order: list[FromRank] = []  # all other pending messages
        self._num_pending_tokens = 0
        self._goodbye: Goodbye | None = None  # set when closing
        self._end_writer = False
        self._end_expected = False  # requested by either side
        self._refusal: str | None = None  # why the stream ended
        self._is_refused = False  # whether the front ended it on purpose
        self._is_taken = False  # accepted by the front; from then on, a loss is received
        self._welcome = threading.Event()
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None
        self._rows = ArrivingRows()

    def open(self, timeout_s: float) -> None:
        """Connect, introduce this rank and wait until the front has accepted it.

        Raises:
            LinkError: No front answered within `timeout_s` seconds, or it refused this rank.
        """
        assert self._channel is None, "a link is opened once"
        deadline_s = time.monotonic() + timeout_s
        reach(self.address, min(timeout_s, CONNECT_TIMEOUT_S))
        self._channel = grpc.insecure_channel(self.address, options=OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout_s)
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise LinkError(f"no front answers at {self.address} within {timeout_s:g} s") from None
        attach = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")
        call = attach(self._handshake.seal(self._messages()), metadata=self._handshake.metadata(self._token))
        self._reader = threading.Thread(target=self._read, args=(call,), name="rank-link", daemon=True)
        self._reader.start()
        if not self._welcome.wait(max(0.0, deadline_s - time.monotonic())):
            self._shut()
            raise LinkError(f"the front at {self.address} did not accept this rank within {timeout_s:g} s")
        if self._refusal is not None and not self._is_taken:
            self._shut()
            if not self._is_refused:
                raise LinkError(
                    f"the front at {self.address} was lost before it accepted rank {self._facts.rank}: {self._refusal}"
                )
            raise RefusedError(
                f"the front at {self.address} refused rank {self._facts.rank}: {self._refusal}"
            )

    def send(self, message: FromRank) -> None:
        """Queue a message, merged with those that wait; never blocks. Does nothing after the link is lost or closed."""
        kind, message = type(message), to_service(message, self._pool)
        with self._changed:
            if self._end_writer or self._goodbye is not None:
                return
            if isinstance(message, StepOutput):
                self._num_pending_tokens += sum(len(output.token_ids) for output in message.outputs)
                self._newest[kind] = _merged(self._newest.get(kind), message)
            elif kind in (*SENT_FIRST, *SENT_LAST):
                self._newest[kind] = message
            else:
                self._in_order.append(message)
            is_overrun = self._num_pending_tokens > MAX_PENDING_TOKENS
            self._changed.notify()
        if is_overrun:
            self._lose(f"the front at {self.address} does not read: {MAX_PENDING_TOKENS} tokens are pending")

    def close(self, reason: str = "") -> None:
        """Send what is queued, then a goodbye with `reason` (empty after a requested stop), and disconnect."""
        with self._changed:
            self._end_expected = True
            if self._goodbye is None:
                self._goodbye = Goodbye(by_rank(reason, self._pool))
            self._changed.notify()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(CLOSE_TIMEOUT_S)
        self._shut()

    def _messages(self) -> Iterator[object]:
        """Yield messages to gRPC, merged while it was busy."""
        yield self._facts
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._end_writer:
                    return
                newest, in_order, goodbye = self._newest, self._in_order, self._goodbye
                self._newest, self._in_order, self._num_pending_tokens = {}, [], 0
            yield from (newest[kind] for kind in SENT_FIRST if kind in newest)
            yield from in_order
            yield from (newest[kind] for kind in SENT_LAST if kind in newest)
            if goodbye is not None:
                yield goodbye
                return

    def _has_news(self) -> bool:
        return bool(self._newest or self._in_order or self._goodbye or self._end_writer)

    def _read(self, call: grpc.Call) -> None:
        """Pass the front's messages on until the stream ends or a message is invalid."""
        reason, is_broken = "the front closed the stream", False
        assert self._channel is not None, "the channel is open"
        is_refused = True
        try:
            for message in self._handshake.open(call):
                self._take(message)
        except grpc.RpcError as error:
            reason, is_broken = _explain(error), True
            is_refused = isinstance(error, grpc.Call) and error.code() in _REFUSALS
        except SealError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - otherwise the rank would look alive but take no requests
            reason = f"invalid message from the front: {type(error).__name__}: {error}"
        self._is_refused = is_refused
        self._channel.close()  # before the receiver opens the next one
        self._lose(reason, is_broken=is_broken)

    def _take(self, message: ToRank | Welcome | RowsPart) -> None:
        if isinstance(message, Welcome):
            self._is_taken = True
            self.on_welcome()
            self._welcome.set()
            return
        if isinstance(message, RowsPart):
            self._rows.add(message)
            return
        if isinstance(message, Submit):
            message = self._rows.placed(message)
        if isinstance(message, Stop):
            self._end_expected = True
        self._receive(to_pool(message, self._pool))

    def _lose(self, reason: str, *, is_broken: bool = False) -> None:
        """Record the end of the stream once. Pass it on unless the link was closed or never accepted."""
        with self._changed:
            first = not self._end_writer
            self._end_writer = True
            welcomed = self._welcome.is_set()
            self._refusal = self._refusal or reason
            self._newest.clear()
            self._changed.notify()
        self._welcome.set()
        if first and welcomed and not self._end_expected:
            self._receive(FrontLost(reason, is_broken))

    def _shut(self) -> None:
        with self._changed:
            self._end_writer = True
            self._changed.notify()
        if self._channel is not None:
            with contextlib.suppress(ValueError):  # already closed
                self._channel.close()


def _merged(before: StepOutput | None, after: StepOutput) -> StepOutput:
    """Append to the outputs of `before`, which is not used again. The newer statistics replace the older."""
    if before is None:
        return StepOutput([*after.outputs], after.stats)
    before.outputs.extend(after.outputs)
    return StepOutput(before.outputs, after.stats or before.stats)


def reach(address: str, timeout_s: float) -> None:
    """Wait until the front's port accepts connections, which it does before its address is published.

    Raises:
        LinkError: The port accepts none within `timeout_s`.
    """
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + timeout_s
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.05, left_s)).close()
        except OSError as error:
            if left_s > RETRY_S:
                time.sleep(RETRY_S)
                continue
            raise LinkError(
                f"no front answers at {address} within {timeout_s:g} s ({error.strerror or error}); check that this node "
                "can reach that address and that no firewall blocks it"
            ) from error
        return


class Handshake:
    """A rank's end of a sealed stream. It sends nothing before the front's nonce arrives."""

    def __init__(self, cluster_key: bytes | None) -> None:
        """Args: cluster_key is the cluster key; None disables sealing."""
        self._key, self._nonce = cluster_key, make_nonce()
        self._seal: Future[Seal | None] = Future()  # None if the front has refused this end

    def metadata(self, token: str) -> tuple[tuple[str, str], ...]:
        """Return the stream's metadata."""
        said = ((TOKEN_KEY, bearer(token)), (DEFINITION_KEY, DEFINITION))
        return said if self._key is None else (*said, (NONCE_KEY, self._nonce))

    def seal_with(self, front_nonce: str) -> Seal:
        """Return this end of the stream, with the nonce that the front has sent."""
        return Seal(self._key, is_front=False, rank_nonce=self._nonce, front_nonce=front_nonce)

    def seal(self, messages: Iterator[object]) -> Iterator[bytes]:
        """Yield the messages for gRPC. Its thread blocks here until `open` was called."""
        seal = self._seal.result()
        if seal is not None:
            for message in messages:
                yield seal.seal(encode(message))

    def open(self, call: grpc.Call) -> Iterator[Any]:
        """Yield the front's messages.

        Raises:
            grpc.RpcError: The stream broke, or was refused.
            SealError: The other end has no cluster key, or another one.
        """
        nonce = ""
        try:
            if self._key is not None:
                nonce = str(dict(call.initial_metadata() or ()).get(NONCE_KEY, ""))
            is_refused = self._key is not None and not nonce
            seal = self.seal_with(nonce)
            self._seal.set_result(None if is_refused else seal)
        finally:
            if not self._seal.done():
                self._seal.set_result(None)
        for message in call:
            if is_refused:
                raise SealError(f"the program that answers there has no cluster key; {SAME_KEY}")
            yield decode(seal.open(message))


def claim(
    address: str, token: str, claim: Claim, timeout_s: float, *, cluster_key: bytes | None = None
) -> Claimed:
    """Ask the front for the rank of a worker of a joining node.

    Raises:
        LinkError: No front answered, or it refused this node.
    """
    answer = _answer_to(claim, address, token, timeout_s, cluster_key)
    if not isinstance(answer, Claimed):
        raise LinkError(f"the front at {address} did not answer the claim")
    return answer


def find_return(
    address: str, token: str, rank: int, timeout_s: float, *, cluster_key: bytes | None = None
) -> ReturnTo:
    """Ask the front how many ranks an engine returns to, and which experts it should load.

    Raises:
        RefusedError: The service does not want this rank.
        LinkError: No front answered.
    """
    answer = _answer_to(ReturnOf(rank), address, token, timeout_s, cluster_key)
    if not isinstance(answer, ReturnTo):
        raise LinkError(f"the front at {address} did not answer rank {rank}")
    if answer.refusal:
        raise RefusedError(f"the front at {address} refused rank {rank}: {answer.refusal}")
    return answer


def _answer_to(
    message: Claim | ReturnOf, address: str, token: str, timeout_s: float, cluster_key: bytes | None
) -> Any:
    """Return the front's answer to a message that is alone on its stream.

    Raises:
        LinkError: No front answered, or it refused this node.
    """
    reach(address, timeout_s)
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        attach, handshake = channel.stream_stream(f"/{SERVICE}/{METHOD}"), Handshake(cluster_key)
        try:
            call = attach(
                handshake.seal(iter([message])), metadata=handshake.metadata(token), timeout=timeout_s,
                wait_for_ready=isinstance(message, ReturnOf),  # the front may still start
            )  # fmt: skip
            answer = next(handshake.open(call), None)
        except grpc.RpcError as error:
            is_refused = isinstance(error, grpc.Call) and error.code() in _REFUSALS
            kind = RefusedError if is_refused or isinstance(message, Claim) else LinkError
            raise kind(f"the front at {address} refused this node: {_explain(error)}") from error
        except SealError as error:
            raise RefusedError(f"the front at {address} failed the key check: {error}") from error
    return answer


def _explain(error: grpc.RpcError) -> str:
    """Describe how a stream ended, with the other side's own message if there is one."""
    details = error.details() if isinstance(error, grpc.Call) else str(error)
    code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
    return f"{details or 'no reason given'} ({code})"
