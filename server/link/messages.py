"""The messages between the front and the ranks: each is one class, and its fields are its complete definition.

To add one: define its class here and list it in `FromRank` or `ToRank`; send it with `RankLink.send`, `Ranks.post` or
`Ranks.post_all`; and add its `case` to `_Front._receive`, `PoolFront.receive` or `FrontStream.receive`. If it names ranks, add it
to `pool_numbers`. mypy reports a missing `case`.

They use the scheduler's types (requests, outputs, reports) and add those that only the link needs. A message is JSON:
[name, fields by position]. A field's annotation determines how it is read, so no second description is needed. A dataclass
omits the last fields if they have their defaults: most outputs are an id and a token.
Both ends must have the same definitions: the front refuses a rank with others (`DEFINITION`). Floats keep
their bits, arrays travel as bytes, and deadlines as timeouts, because the clocks of two machines differ.

Rejected: protocol buffers, which need a second description of every message and a conversion each way; pickle, which lets
everyone who can write to the port run code.
"""

import base64
import dataclasses
import functools
import hashlib
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from expert_placement.files import from_json, to_json
from expert_placement.placement import Placement
from kvcache.tiers.jobs import PeerAddress
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, PlacementReport
from scheduler.policy.request import (
    AdapterOrder,
    AdapterReport,
    ForgetPrefixes,
    MemoryOrder,
    RankStats,
    Request,
    RequestOutput,
    Withdraw,
)
from scheduler.weights.versions import WeightOrder, WeightReport
from server.options.pools import Pool, Role

SERVICE, METHOD = "wideep.Front", "Attach"  # gRPC names of the one stream that a rank keeps open
TOKEN_KEY, DEFINITION_KEY = "authorization", "wideep-messages"  # metadata of that stream

OPTIONS: tuple[tuple[str, int], ...] = (  # gRPC options of both ends
    ("grpc.max_receive_message_length", 256 << 20),  # bytes; a prompt of a million tokens takes about 7 MB
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.enable_http_proxy", 0),  # connect to ranks directly, even if http_proxy is set
    # A dead process closes its connection immediately. Pings detect a host or a cable that vanished silently. They are
    # patient, because with too few cores a process may not run for seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # accept any number of pings without data
    ("grpc.so_reuseport", 0),  # two fronts must not share one port unnoticed
    # Otherwise a new channel shares the back-off of an old one to the same address, whose front was killed: a second.
    ("grpc.use_local_subchannel_pool", 1),
)


def bearer(token: str) -> str:
    """Return the metadata value for `token`."""
    return f"Bearer {token}"


class Served(NamedTuple):
    """The state of a rank that a restarted front needs."""

    epoch: int  # of the newest order
    version: int  # of the placement in use
    # The newest placement over all ranks; None if only some ranks have served since this one started.
    home: Placement | None
    expert_bytes: int  # of one expert of one layer
    experts: ExpertMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFacts:
    """A rank's first message: it has loaded its weights and is ready."""

    rank: int  # in the service, as in all messages
    world_size: int  # ranks of all pools when its pool joined
    host: str
    pid: int
    max_model_len: int  # tokens, prompt plus output
    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str  # as in `EngineConfig`
    num_restarts: int = 0  # of this rank's engine; 0 if it started with the service
    served: Served | None = None  # None on the first attachment of this engine
    # Of a restarted engine: its placement and its pool's newest epoch, which a front uses if it knows no others. None at the start.
    loaded: Served | None = None
    # Seconds that it must live to be restarted after its death; 0 if it is restarted in any case.
    restartable_in_s: float = 0.0
    node: str = ""  # identifies the torchrun; shared by its ranks
    kv_peer: PeerAddress | None = None  # where other nodes fetch prefixes; None if they cannot
    memory: MemoryOrder | None = None  # the newest one of an earlier front
    weights: WeightOrder | None = None  # the newest order to serve that it got from an earlier front
    forgotten: int = 0  # generation of the newest order to forget prefixes that it got; 0 for none
    kv_generation: int = 0  # of the records in its tiers, which a disk keeps over restarts; 0 without tiers


class PoolClaim(NamedTuple):
    """The pool of a joining torchrun."""

    name: str
    role: Role
    run: str  # identifies the torchrun; shared by the workers of all its nodes
    rank: int  # of the worker in its torchrun
    num_ranks: int  # of the torchrun


class Claim(NamedTuple):
    """The first message of a worker of a joining node, instead of `RankFacts`: a request for a rank."""

    node: str  # identifies the torchrun; shared by its workers on one node
    local_rank: int
    num_ranks: int  # on this node
    pool: PoolClaim | None = None  # None claims a rank of a lost node of any pool


class Claimed(NamedTuple):
    """The front's answer to a claim, which ends the stream."""

    rank: int
    world_size: int  # for the engine's `RankFacts`, as is `num_restarts`
    num_restarts: int
    refusal: str = ""  # why no rank was assigned
    may_come: bool = False  # whether a retry may succeed
    pool: Pool | None = None  # of the rank; None if no rank was assigned


class ReturnOf(NamedTuple):
    """The first message of an engine that did not start with the service, before it loads anything, instead of `RankFacts`."""

    rank: int


class ReturnTo(NamedTuple):
    """The front's answer to `ReturnOf`, which ends the stream."""

    num_ranks: int  # of the service, with this rank; 0 if it has pools of fixed sizes
    placement: Placement | None  # over all of them, of which it loads its share; None if the front knows none
    refusal: str = ""  # why the service does not want the rank


class KeptFile(NamedTuple):
    """A file in the folder that outlives a front."""

    path: str  # relative to the folder
    num_bytes: int
    mtime_ns: int


class Follow(NamedTuple):
    """The first message of the standby's front (`--standby`), instead of `RankFacts`. The leading front then sends its files."""

    files: list[KeptFile]  # the copies that the standby has
    has_taken_over: bool = False  # it leads now, and the other front must end


class FilePart(NamedTuple):
    """Bytes of a file of the leading front, for the standby. A file's first part replaces the copy."""

    path: str
    offset: int  # the number of bytes that the copy has before, or 0
    content: np.ndarray  # uint8
    mtime_ns: int
    is_last: bool


class FileGone(NamedTuple):
    """The leading front has removed a file."""

    path: str


class Copied(NamedTuple):
    """Sent by the leading front behind files, and returned by the standby when it has written them."""

    number: int


class ServiceEnds(NamedTuple):
    """The leading front ends in order, so the standby does not take over."""


class MirrorOf(NamedTuple):
    """The first message of a node's first front to that of another node, instead of `RankFacts`. Its `BoardChange`s follow."""

    node: int  # among those with fronts


class MirroredFile(NamedTuple):
    """A small file that the fronts of a service share."""

    name: str
    content: str


class TableRows(NamedTuple):
    """Replaced entries of a table that the fronts of a service share."""

    name: str
    entries: np.ndarray  # [entries, 1 + numbers] int64: the entry's place, and its numbers


class BoardChange(NamedTuple):
    """What the fronts of a node have written since the message before."""

    is_whole: bool  # everything, because the receiver may have missed some
    version: int  # of the state of the service; 0 if the sender does not lead
    files: list[MirroredFile]
    cells: np.ndarray  # [cells, 2] int64: the place in the rows of the node's fronts, and the number
    tables: list[TableRows]


class Tunnel(NamedTuple):
    """The first message of a connection to a front of another node, and its answer. `TunnelBytes` follow, both ways."""


class TunnelBytes(NamedTuple):
    """Bytes of a connection between two fronts."""

    content: np.ndarray  # uint8


class StepOutput(NamedTuple):
    """Outputs and statistics of one or more steps; sent if there are outputs or statistics are due."""

    outputs: list[RequestOutput]
    stats: RankStats | None


class PlacementUpdate(NamedTuple):
    """The outcome of a placement change. Rank 0's first one describes the placement at the start."""

    report: PlacementReport
    placement: Placement | None = None
    expert_bytes: int = 0  # of one expert of one layer; 0 if not given


class Regrouped(NamedTuple):
    """A rank serves in the epoch of its order."""

    epoch: int


class Fault(NamedTuple):
    """A rank's steps failed; it waits for an order."""

    epoch: int  # of the steps, or of the order that it cannot follow
    reason: str
    is_final: bool = False  # it cannot follow that order, so it needs another one


class ExpertsRead(NamedTuple):
    """A rank has read the experts that a coming order gives it."""

    version: int  # of the placement in `ReadExperts`
    problem: str  # why it could not; "" if all are there


class MemoryUse(NamedTuple):
    """Memory of a rank's process on its host, sent with a heartbeat if it has changed by more than a hundredth."""

    resident_bytes: int


class MemorySwitched(NamedTuple):
    """A rank has followed a memory order, at the same step as all others."""

    number: int


class Goodbye(NamedTuple):
    """A rank ends; `reason` is empty after a requested stop."""

    reason: str


class Welcome(NamedTuple):
    """The front has accepted a rank. A refusal ends the stream with a status instead."""


class RowsPart(NamedTuple):
    """A part of an image's rows, for a rank that cannot open their file. The parts of all images come before their request."""

    digest: str  # of the image
    shape: list[int]  # of all its rows: [L, N, D] float32
    start: int  # the part's first byte
    content: np.ndarray  # uint8


class Submit(NamedTuple):
    """A request to serve. Its times are on the sender's clock; `request_at` converts them to the receiver's."""

    request: Request  # without its tokens, of which there may be a million
    prompt_ids: np.ndarray  # uint32
    replayed_ids: np.ndarray  # uint32
    timeout_s: float | None  # None without a deadline

    @classmethod
    def of(cls, request: Request, now_s: float) -> "Submit":
        """Return the message for a request that is sent at `now_s`, time.monotonic() of the sender."""
        timeout_s = None if request.deadline_s is None else request.deadline_s - now_s
        prompt, replayed = (np.array(ids, np.uint32) for ids in (request.prompt_ids, request.replayed_ids))
        return cls(dataclasses.replace(request, prompt_ids=(), replayed_ids=()), prompt, replayed, timeout_s)

    def request_at(self, now_s: float) -> Request:
        """Return the request as received at `now_s`, time.monotonic() of the receiver."""
        return dataclasses.replace(
            self.request,
            prompt_ids=tuple(self.prompt_ids.tolist()),
            replayed_ids=tuple(self.replayed_ids.tolist()),
            arrival_s=now_s,
            deadline_s=None if self.timeout_s is None else now_s + self.timeout_s,
        )


class Expect(NamedTuple):
    """Load a request's blocks while it runs on another rank of the host, because that rank will hand it over or release it."""

    request_id: str
    submit: Submit | None  # None: the request stays elsewhere
    in_step: bool = False  # both ranks run in lock-step


class Abort(NamedTuple):
    """Drop a request. An output with a finish_reason follows, unless one was already sent."""

    request_id: str


class Stop(NamedTuple):
    """End in an orderly way."""


class Prepare(NamedTuple):
    """Move experts, and switch when all ranks have received theirs. Only one at a time."""

    placement: Placement


class ReadExperts(NamedTuple):
    """Read the missing experts of this rank's part of a placement, over other ranks, for a coming order."""

    placement: Placement


class DropPlacement(NamedTuple):
    """Drop a placement that is not in use yet, or what was read for it."""

    version: int


FromRank = (
    StepOutput | Heartbeat | LoadReport | ExpertMap | PlacementUpdate | Regrouped | Fault | MemoryUse | MemorySwitched
    | WeightReport | AdapterReport | ExpertsRead
)  # fmt: skip
ToRank = (
    Submit | Expect | Abort | Withdraw | Stop | Prepare | ReadExperts | DropPlacement | Order | ForgetPrefixes | MemoryOrder
    | WeightOrder | AdapterOrder
)  # fmt: skip
# These begin and end a stream, or travel before another message. Its two ends handle them.
_OfStream = (
    RankFacts | Claim | Claimed | ReturnOf | ReturnTo | Welcome | Goodbye | Follow | FilePart | FileGone | Copied | ServiceEnds
    | RowsPart | MirrorOf | BoardChange | Tunnel | TunnelBytes
)  # fmt: skip
_KINDS = typing.get_args(FromRank | ToRank | _OfStream)
_MESSAGES: dict[str, type] = {each.__name__: each for each in _KINDS}

# Messages that wait on a rank leave in this order: those of SENT_FIRST, all others as they were queued, those of SENT_LAST.
# A newer message of a class listed here replaces one that waits; outputs are merged.
# `ExpertMap` leaves before the report that its placement is in use.
SENT_FIRST = (Heartbeat, StepOutput, ExpertMap)
SENT_LAST = (LoadReport,)

_Read = Callable[[Any], Any]
_EMPTY_LIST = object()  # marks a default
_FORM = 2  # version of the way in which messages are written


def encode(message: object) -> bytes:
    """Serialise a message."""
    return _write([type(message).__name__, message]).encode()


def decode(content: bytes) -> Any:
    """Parse a message.

    Raises:
        ValueError, TypeError, LookupError: It is not one of these messages.
    """
    name, fields = json.loads(content)
    read = _reader_of(_MESSAGES[name])
    assert read is not None, "messages are records"
    return read(fields)


def _plain(value: Any) -> Any:
    """Return a JSON-compatible form of a value. The encoder itself writes named tuples as lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Placement):
        kind: Any = type(value)
        return _without_defaults(list(vars(value).values()), _defaults_of(kind))
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Placement):
        return to_json(value)
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross between front and ranks")


def _without_defaults(fields: list[Any], defaults: tuple[Any, ...]) -> list[Any]:
    """Remove the last fields that are their defaults. An equal value of another type or sign (0, 0.0, -0.0) stays."""
    for default in defaults:
        last = fields[-1]
        if last is not default and not (default is _EMPTY_LIST and type(last) is list and not last):
            break
        fields.pop()
    return fields


@functools.cache
def _defaults_of(kind: Any) -> tuple[Any, ...]:
    """Return the defaults of a dataclass's fields, the last field first, up to the first one without. Others have none."""
    defaults: list[Any] = []
    if not dataclasses.is_dataclass(kind):
        return ()
    for field in reversed(dataclasses.fields(kind)):
        if field.default is not dataclasses.MISSING:
            defaults.append(field.default)
        elif field.default_factory is list:
            defaults.append(_EMPTY_LIST)
        else:
            break
    return tuple(defaults)


_write = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False).encode


@functools.cache
def _reader_of(kind: Any) -> _Read | None:
    """Return a function that converts a JSON value to this annotation's type, or None if no conversion is needed."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (int, float, str, bool):
        return None
    if kind is np.ndarray:
        return _read_array
    if kind is Placement:
        return from_json
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {member.value: member for member in kind}.__getitem__
    if origin in (types.UnionType, typing.Union):
        [inner] = [each for each in arguments if each is not types.NoneType]
        return _optional(_reader_of(inner))
    if origin is list:
        return _list(_reader_of(arguments[0]))
    if origin is tuple:
        assert arguments[1:] == (Ellipsis,), f"{kind}: a tuple of several kinds is a NamedTuple"
        inner = _list(_reader_of(arguments[0]))
        return tuple if inner is None else lambda values: tuple(inner(values))
    return _record(kind)


def _optional(read: _Read | None) -> _Read | None:
    return None if read is None else lambda value: None if value is None else read(value)


def _list(read: _Read | None) -> _Read | None:
    return None if read is None else lambda values: [read(value) for value in values]


def _record(kind: Any) -> _Read:
    """Read a dataclass or a NamedTuple by position. It is one expression for each number of fields, because every token of
    every stream passes here."""
    readers = {name: _reader_of(hint) for name, hint in _hints(kind).items()}
    arguments = [
        f"{name}=readers[{name!r}](values[{place}])" if read else f"{name}=values[{place}]"
        for place, (name, read) in enumerate(readers.items())
    ]
    reads: dict[int, _Read] = {
        num: eval(f"lambda values: kind({', '.join(arguments[:num])})", {"kind": kind, "readers": readers})
        for num in range(len(arguments) - len(_defaults_of(kind)), len(arguments) + 1)
    }
    return lambda values: reads[len(values)](values)


def _read_array(value: list[Any]) -> np.ndarray:
    dtype, shape, content = value
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)


def _hints(kind: Any) -> dict[str, Any]:
    is_tuple = issubclass(kind, tuple)
    names = kind._fields if is_tuple else [field.name for field in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in names}


def _definition(kinds: tuple[Any, ...]) -> str:
    """Return a digest of all definitions that both ends must share."""
    described = {}
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        is_record = hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)
        if is_record and kind.__name__ not in described:
            hints = _hints(kind)
            described[kind.__name__] = {name: str(hint) for name, hint in hints.items()}
            waiting += hints.values()
        waiting += typing.get_args(kind)
    return hashlib.sha256(json.dumps([_FORM, described], sort_keys=True).encode()).hexdigest()[:16]


DEFINITION = _definition(_KINDS)
