"""Decide how many ranks a service needs: a pure function of its state and the next sample of its load.

The load of a sample is counted in ranks: how many would run it at the target use of their seats and of their KV cache. A size
*fits* if the load is at most the size. Targets (the time to the first token, the time between tokens, the predicted wait) that are
missed during all of `up_after_s` show that seats and memory are not the limit: the load per rank becomes the knee, which a size must
stay below.

- It grows to the smallest size that fits, if that was too small during all of `up_after_s`.
- It shrinks to the smallest size that fits with the margin, if that was enough during all of `down_after_s`. The margin is why a
  constant load never has two sizes in turn: a size that was grown to is never larger than one that is shrunk to.
- After a change it waits as long again. A step is at most `most_step` ranks, and only leads to sizes that the service accepts.

A knee is forgotten when the targets are met with clearly more load per rank, because something else was the cause. Targets that an
almost idle service misses set no knee: more ranks would not help. Kubernetes' HorizontalPodAutoscaler has the same windows, but no
knee and no margin between growing and shrinking.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST_LOAD = 0.2  # per rank; with less, a missed target has another cause
_ALMOST = 1e-9  # of a rank: loads are quotients


class LoadSample(NamedTuple):
    """The load of a service at one moment."""

    time_s: float
    ranks: int  # that served, at least 1
    seats: int  # requests that these ranks run at once, at least 1
    requests: int  # running and waiting
    kv_usage: float  # share of used KV blocks
    wait_s: float = 0.0  # predicted
    ttft_s: float | None = None  # p99, or None without requests
    itl_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to keep to. A target of None is not checked."""

    sizes: tuple[int, ...]  # numbers of ranks to choose from, ascending
    use: float = 0.7  # target share of seats and of KV blocks
    margin: float = 0.2  # share of a smaller size that must stay free
    wait_s: float | None = 5.0
    ttft_s: float | None = None
    itl_s: float | None = None
    up_after_s: float = 30.0
    down_after_s: float = 300.0
    most_step: int = 4

    def __post_init__(self) -> None:
        assert self.sizes and tuple(sorted({*self.sizes})) == self.sizes, "the caller sorts the sizes"
        assert self.use > 0 and 0 <= self.margin < 1 and self.most_step >= 1, "flags are checked"


class _Load(NamedTuple):
    """The load of a sample, in ranks at the target use."""

    time_s: float
    ranks: float
    why: str


class State(NamedTuple):
    """What the policy remembers."""

    size: int  # the present number of ranks
    begun_s: float | None = None  # time of the first sample
    changed_s: float | None = None  # time of the last change
    loads: tuple[_Load, ...] = ()  # of the longer window, oldest first
    missing_s: float | None = None  # since when targets have been missed; None if the last sample met them
    knee: float | None = None  # smallest load per rank at which a target was missed
    missed: str = ""  # that target


class SizeChange(NamedTuple):
    """A change of the number of ranks."""

    time_s: float
    before: int
    after: int
    why: str


def decide(policy: Policy, state: State, sample: LoadSample) -> tuple[State, SizeChange | None]:
    """Return the state after a sample, and the change that the policy makes, or None."""
    now_s, load = sample.time_s, _load_of(policy, sample)
    since_s = now_s - max(policy.up_after_s, policy.down_after_s)
    state = _with_knee(policy, state, sample, load)
    state = state._replace(
        begun_s=now_s if state.begun_s is None else state.begun_s,
        loads=(*(each for each in state.loads if each.time_s >= since_s), load),
    )
    decision = _growth(policy, state, now_s) or _shrinkage(policy, state, now_s)
    if decision is not None:
        state = state._replace(size=decision.after, changed_s=now_s)
    return state, decision


def replay(policy: Policy, size: int, samples: Sequence[LoadSample]) -> Iterator[SizeChange]:
    """Yield the changes of the size, during samples in the order of time."""
    state = State(size)
    for sample in samples:
        state, decision = decide(policy, state, sample)
        if decision is not None:
            yield decision


def load_of(policy: Policy, sample: LoadSample) -> float:
    """Return how many ranks would run a sample's load at the target use."""
    return _load_of(policy, sample).ranks


def _load_of(policy: Policy, sample: LoadSample) -> _Load:
    by_seats = sample.requests * sample.ranks / (sample.seats * policy.use)
    by_memory = sample.kv_usage * sample.ranks / policy.use
    if by_memory > by_seats:
        why = f"a KV cache of {sample.ranks} ranks that is {sample.kv_usage:.0%} full"
        return _Load(sample.time_s, by_memory, why)
    return _Load(sample.time_s, by_seats, f"{sample.requests} running and waiting requests")


def _with_knee(policy: Policy, state: State, sample: LoadSample, load: _Load) -> State:
    """Learn from a missed target at which load per rank targets are missed."""
    per_rank, now_s = load.ranks / sample.ranks, sample.time_s
    missed = next(_missed(policy, sample), None)
    if missed is None:
        is_refuted = state.knee is not None and per_rank > state.knee * (1 + policy.margin)
        state = state._replace(missing_s=None)
        return state._replace(knee=None, missed="") if is_refuted else state
    state = state._replace(missing_s=now_s if state.missing_s is None else state.missing_s)
    is_lower = state.knee is None or per_rank < state.knee
    is_lasting = state.missing_s is not None and now_s - state.missing_s >= policy.up_after_s
    if is_lasting and is_lower and per_rank >= LEAST_LOAD:
        return state._replace(knee=per_rank, missed=missed)
    return state


def _missed(policy: Policy, sample: LoadSample) -> Iterator[str]:
    """Yield the targets that a sample misses, as text."""
    for name, value, target in (
        ("the time to the first token (p99)", sample.ttft_s, policy.ttft_s),
        ("the time between tokens (p99)", sample.itl_s, policy.itl_s),
        ("the predicted wait", sample.wait_s, policy.wait_s),
    ):
        if value is not None and target is not None and value > target:
            yield f"{name} was {value:.3g} s, over {target:.3g} s"


def _fits(load: float, size: int, knee: float | None, margin: float) -> bool:
    """Return whether a size runs a load, with a share of the size left free."""
    most = size * (1 - margin)
    return load <= most + _ALMOST and (knee is None or load < knee * most - _ALMOST)


def _smallest(policy: Policy, state: State, loads: Sequence[_Load], margin: float) -> tuple[int, _Load]:
    """Return the smallest size that fits the largest of some loads, or the largest size if none does."""
    most = max(loads, key=lambda load: load.ranks)
    fitting = (size for size in policy.sizes if _fits(most.ranks, size, state.knee, margin))
    return next(fitting, policy.sizes[-1]), most


def _has_waited(state: State, now_s: float, wait_s: float) -> bool:
    """Return whether there are samples of a whole window, and whether the last change was before it."""
    times_s = (state.begun_s, state.changed_s)
    return all(time_s is None or now_s - time_s >= wait_s for time_s in times_s)


def _growth(policy: Policy, state: State, now_s: float) -> SizeChange | None:
    if not _has_waited(state, now_s, policy.up_after_s):
        return None
    recent = [load for load in state.loads if load.time_s >= now_s - policy.up_after_s]
    least = min(recent, key=lambda load: load.ranks)
    wanted, load = _smallest(policy, state, [least], 0.0)
    if wanted <= state.size:
        return None
    larger = [size for size in policy.sizes if state.size < size <= wanted]
    after = max((size for size in larger if size <= state.size + policy.most_step), default=larger[0])
    why = f"{load.why} need {load.ranks:.1f} ranks"
    if load.ranks <= state.size:  # the load is not the cause
        why = f"at least {after} ranks are allowed" if state.size < policy.sizes[0] else state.missed
    return SizeChange(now_s, state.size, after, why)


def _shrinkage(policy: Policy, state: State, now_s: float) -> SizeChange | None:
    if not _has_waited(state, now_s, policy.down_after_s):
        return None
    recent = [load for load in state.loads if load.time_s >= now_s - policy.down_after_s]
    wanted, load = _smallest(policy, state, recent, policy.margin)
    if wanted >= state.size:
        return None
    smaller = [size for size in policy.sizes if wanted <= size < state.size]
    after = min((size for size in smaller if size >= state.size - policy.most_step), default=smaller[-1])
    why = f"{load.why} needed at most {load.ranks:.1f} ranks for {policy.down_after_s:g} s"
    if state.size > policy.sizes[-1]:
        why = f"at most {policy.sizes[-1]} ranks are allowed"
    return SizeChange(now_s, state.size, after, why)
