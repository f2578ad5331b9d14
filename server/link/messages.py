"""What crosses between the front and the ranks: each message is one class, and its fields are all that is said of it.

The vocabulary is the scheduler's (requests, outputs, reports) with what only the link says. A message is written as JSON,
[name, fields by position]; how a field is read follows from its annotation, so that there is no second description to keep
in step. Both ends are of one version: a rank that was built from other definitions is refused (`DEFINITION`). Floats keep
their bits, arrays travel as bytes, and times as time-outs, because the clocks of two machines differ.

Rejected: protocol buffers, which describe every message a second time and need a conversion each way; pickle, which lets
whoever can write to the port run code.
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
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, LoadReport, PlacementReport
from scheduler.policy.request import ForgetPrefixes, RankStats, Request, RequestOutput, Withdraw

SERVICE, METHOD = "wideep.Front", "Attach"  # gRPC's names of the one stream that a rank keeps for life
TOKEN_KEY, DEFINITION_KEY = "authorization", "wideep-messages"  # metadata of that stream

OPTIONS: tuple[tuple[str, int], ...] = (  # of gRPC, at both ends
    ("grpc.max_receive_message_length", 256 << 20),  # bytes; a prompt of a million tokens takes about 7 MB
    ("grpc.max_send_message_length", 256 << 20),
    ("grpc.enable_http_proxy", 0),  # ranks are reached directly, whatever http_proxy says
    # A dead process closes its connection at once. Pings are for a host or a cable that vanished silently, and
    # patient, because a machine with too few cores may leave a process without time for seconds.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 30_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),  # an end that gets pings without data never hangs up for it
    ("grpc.so_reuseport", 0),  # two fronts must not share one port unnoticed
)


def bearer(token: str) -> str:
    """Return the metadata value that carries `token`."""
    return f"Bearer {token}"


class Served(NamedTuple):
    """What a rank that has served tells a front that was started again."""

    epoch: int  # the newest that it was ordered to
    version: int  # of the placement that it serves
    home: (
        Placement | None
    )  # the newest of all ranks together; None: this rank has served with some of them only
    expert_bytes: int  # of one expert of one layer
    experts: ExpertMap


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank says about itself when it attaches: it has its weights and is ready."""

    rank: int
    world_size: int
    host: str
    pid: int
    max_model_len: int  # tokens, prompt plus output
    num_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str  # as `EngineConfig` has it
    num_restarts: int = 0  # of this rank's engine; 0: it started with the service
    served: Served | None = None  # None: this engine has not been attached before
    restartable_in_s: float = (
        0.0  # that it would have to live to be started again when it dies; 0: it is at once
    )
    node: str = ""  # the same for all ranks under one torchrun


class Claim(NamedTuple):
    """What a worker of a node that joins says instead of `RankFacts`: it asks which rank it is."""

    node: str  # the same for all workers under one torchrun
    local_rank: int
    num_ranks: int  # of this node


class Claimed(NamedTuple):
    """The front's answer to a claim, which ends the stream."""

    rank: int
    world_size: int
    num_restarts: int  # with which its engine is to attach
    refusal: str = ""  # why it gets none
    may_come: bool = False  # a place may become free


class StepOutput(NamedTuple):
    """What a rank has to say after one or more steps: if they yielded anything, or when stats are due."""

    outputs: list[RequestOutput]
    stats: RankStats | None


class PlacementUpdate(NamedTuple):
    """What became of a placement; the first from rank 0 says what serves at the start."""

    report: PlacementReport
    placement: Placement | None
    expert_bytes: int  # of one expert of one layer; 0: not said


class Regrouped(NamedTuple):
    """A rank serves in the epoch that it was ordered to."""

    epoch: int


class Fault(NamedTuple):
    """A rank's steps broke off; it waits for an order."""

    epoch: int  # whose steps, or whose order it cannot follow
    reason: str
    is_final: bool = False  # it cannot follow that order: only another one helps


class Goodbye(NamedTuple):
    """A rank ends; `reason` is empty when it was asked to."""

    reason: str


class Welcome(NamedTuple):
    """The front has taken a rank; a refusal ends the stream with a status instead."""


class Submit(NamedTuple):
    """A request to serve. Its times are of the sender's clock; the receiver makes them its own (`request_at`)."""

    request: Request  # without its tokens, which may be a million
    prompt_ids: np.ndarray  # uint32, as the next
    replayed_ids: np.ndarray
    timeout_s: float | None  # None: the request has no deadline

    @classmethod
    def of(cls, request: Request, now_s: float) -> "Submit":
        """Return the message that gives a request to a rank at `now_s`, time.monotonic() of the sender."""
        timeout_s = None if request.deadline_s is None else request.deadline_s - now_s
        prompt, replayed = (np.array(ids, np.uint32) for ids in (request.prompt_ids, request.replayed_ids))
        return cls(dataclasses.replace(request, prompt_ids=(), replayed_ids=()), prompt, replayed, timeout_s)

    def request_at(self, now_s: float) -> Request:
        """Return the request as it arrives at `now_s`, time.monotonic() of the receiver."""
        return dataclasses.replace(
            self.request,
            prompt_ids=tuple(self.prompt_ids.tolist()),
            replayed_ids=tuple(self.replayed_ids.tolist()),
            arrival_s=now_s,
            deadline_s=None if self.timeout_s is None else now_s + self.timeout_s,
        )


class Abort(NamedTuple):
    """Drop a request; answered by an output with a finish_reason, unless one was already sent."""

    request_id: str


class Stop(NamedTuple):
    """End in an orderly way."""


class Prepare(NamedTuple):
    """Move experts, and switch once all ranks have theirs; never two at a time."""

    placement: Placement


class DropPlacement(NamedTuple):
    """Give up a placement that does not serve yet."""

    version: int


FROM_RANK = (
    RankFacts,
    Claim,
    Heartbeat,
    StepOutput,
    LoadReport,
    ExpertMap,
    PlacementUpdate,
    Regrouped,
    Fault,
    Goodbye,
)
TO_RANK = (Welcome, Claimed, Submit, Abort, Withdraw, Stop, Prepare, DropPlacement, Order, ForgetPrefixes)
_MESSAGES: dict[str, type] = {each.__name__: each for each in (*FROM_RANK, *TO_RANK)}

_Read = Callable[[Any], Any]


def encode(message: object) -> bytes:
    """Write a message."""
    return _write([type(message).__name__, message]).encode()


def decode(content: bytes) -> Any:
    """Read a message.

    Raises:
        ValueError, TypeError, LookupError: it is not one of `FROM_RANK` or `TO_RANK`.
    """
    name, fields = json.loads(content)
    read = _reader_of(_MESSAGES[name])
    assert read is not None, "messages are records"
    return read(fields)


def _plain(value: Any) -> Any:
    """Return what JSON can write instead of a value; it writes named tuples as lists itself."""
    if dataclasses.is_dataclass(value) and not isinstance(value, Placement):
        return list(vars(value).values())
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Placement):
        return to_json(value)
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot cross between front and ranks")


_write = json.JSONEncoder(default=_plain, separators=(",", ":"), check_circular=False).encode


@functools.cache
def _reader_of(kind: Any) -> _Read | None:
    """Return what makes a value of this annotation from JSON; None where JSON's own value is it already."""
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
    """Read a dataclass or a NamedTuple by position; every token of every stream passes here, so it is one expression."""
    readers = {name: _reader_of(hint) for name, hint in _hints(kind).items()}
    arguments = (
        f"{name}=readers[{name!r}](values[{place}])" if read else f"{name}=values[{place}]"
        for place, (name, read) in enumerate(readers.items())
    )
    read: _Read = eval(f"lambda values: kind({', '.join(arguments)})", {"kind": kind, "readers": readers})
    return read


def _read_array(value: list[Any]) -> np.ndarray:
    dtype, shape, content = value
    return np.frombuffer(base64.b64decode(content), dtype).reshape(shape)


def _hints(kind: Any) -> dict[str, Any]:
    is_tuple = issubclass(kind, tuple)
    names = kind._fields if is_tuple else [field.name for field in dataclasses.fields(kind)]
    hints = typing.get_type_hints(kind)
    return {name: hints[name] for name in names}


def _definition(kinds: tuple[Any, ...]) -> str:
    """Return a digest of all that two ends must describe alike to understand each other."""
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
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


DEFINITION = _definition((*FROM_RANK, *TO_RANK))
