"""Checks across nodes: equal programs and checkpoints, reachability and link speed, and a dispatch of realistic size.

Every node computes the same results, because each stage shares the findings of all nodes. Cheap checks run first, and
checks that could only hang after a failure are skipped. At its start, a service runs the first two over its own
store (`serve.store.node_check`).
"""

import contextlib
import json
import select
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from server.machine.interfaces import Taken
from server.machine.lines import say
from server.machine.model_fields import experts_per_token, most, num_experts
from server.machine.report import Check, CheckStatus, as_json, failure, from_json, not_here, ok
from server.machine.roots import WIDEEP_COMMAND
from server.serve.preflight.equal import compare
from server.serve.preflight.model import read_config
from server.serve.store.links import STAGE_S, Gathers, listening, measure, reach
from server.serve.store.meeting import SAY_AFTER_S

TRIAL_COMMAND = (*WIDEEP_COMMAND, "dispatch-trial")
_READY_S = 180.0  # for torch's first import from a cold disk, while other processes import it too
_TRIAL_S = 240.0  # for all sizes; the first run compiles kernels
_TRIAL_TIMEOUT_S = 200.0  # for one exchange, during which the peer may still compile
_DEEPSEEK_V3 = {"hidden": 7168, "top_k": 8, "experts": 256}  # from its config.json
_DECODE_TOKENS = 64


class DispatchTrial:
    """The process that tests a dispatch, started early because it imports torch. A context manager."""

    def __init__(self, command: Sequence[str] = TRIAL_COMMAND) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._left = b""

    def ask(self, order: Mapping[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """Send an order (None waits for the initial message) and return the answer, or {"error": reason}."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        if order is not None:
            with contextlib.suppress(BrokenPipeError):  # it has ended, as reading will show
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._left:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._process.stdout], [], [], left_s)[0]:
                return {"error": f"no answer within {timeout_s:g} s"}
            content = self._process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
            if not content:
                return {"error": f"the trial process exited with status {self._process.wait()}"}
            self._left += content
        line, _, self._left = self._left.partition(b"\n")
        return dict(json.loads(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def check_together(
    meeting: Gathers, own: Sequence[Check], facts: Mapping[str, Any]
) -> Iterator[tuple[str, Check]]:
    """Share each node's own checks and compare facts; yields checks, with the node's name if it is another node.

    Args:
        own: This node's checks. facts: Result of `equal.facts_to_compare`.
    """
    found = meeting.gather("checks", as_json(own), STAGE_S)
    for number, checks in enumerate(found):
        if number != meeting.number:
            yield from ((meeting.names[number], check) for check in from_json(checks) if check.is_wrong)
    yield from (("", check) for check in compare(meeting.names, meeting.gather("facts", facts, STAGE_S)))


def check_ways(meeting: Gathers, taken: Taken, trial: DispatchTrial, sizes: Mapping[str, int], tokens: Sequence[int]) -> Iterator[Check]:  # fmt: skip
    """Check reachability, links and a dispatch. Collective."""
    with listening(taken) as port:
        reached = reach(meeting, taken, port)
        yield from reached
        if any(check.status is CheckStatus.FAILURE for check in reached):
            yield not_here("link", "not measured, because nodes do not reach each other")
            yield not_here("dispatch", "not tested, because nodes do not reach each other")
            return
        # Wait until all these processes have started, so that their imports do not disturb the measurements.
        ready = _patiently(trial, None, "loading torch", _READY_S)
        meeting.gather("ready", None, _READY_S)
        yield from measure(meeting, taken, port)
    yield from _try_dispatch(meeting, taken, trial, ready, {"sizes": sizes, "tokens": list(tokens)})


def _patiently(
    trial: DispatchTrial, order: Mapping[str, Any] | None, doing: str, timeout_s: float
) -> dict[str, Any]:
    """Send an order and return the answer; log `doing` if that takes longer than SAY_AFTER_S."""
    answer = trial.ask(order, SAY_AFTER_S)
    if "error" not in answer or "no answer" not in answer["error"]:
        return answer
    say(f"wideep doctor: {doing}", error=True)
    return trial.ask(None, timeout_s)


def _try_dispatch(
    meeting: Gathers, taken: Taken, trial: DispatchTrial, ready: Mapping[str, Any], order: Mapping[str, Any]
) -> Iterator[Check]:
    answer = dict(ready)
    if meeting.number == 0 and "error" not in answer:
        answer = trial.ask({"store_host": taken.address}, STAGE_S)
    told = meeting.gather("store", {**answer, "host": taken.address}, STAGE_S)
    if not any("error" in each for each in told):
        place = {
            "host": told[0]["host"],
            "port": told[0]["port"],
            "rank": meeting.number,
            "world_size": len(told),
        }
        answer = _patiently(
            trial,
            {**order, **place, "timeout_s": _TRIAL_TIMEOUT_S},
            "testing a dispatch (the first run compiles kernels)",
            _TRIAL_S,
        )
        told = meeting.gather("dispatched", answer, STAGE_S + _TRIAL_S)
    wrong = [(name, each["error"]) for name, each in zip(meeting.names, told, strict=True) if "error" in each]
    if wrong:
        text = "; ".join(f"on {name}: {why}" for name, why in wrong)
        yield failure("dispatch", text, "see docs/nodes.md on interfaces and ports")
        return
    for number in range(len(order["tokens"])):
        yield _judge_dispatch([each["sizes"][number] for each in told], order["sizes"])


def _judge_dispatch(found: Sequence[Mapping[str, float]], sizes: Mapping[str, int]) -> Check:
    """Return a check with the times of a dispatch and its combine on the slowest node."""
    slowest = max(found, key=lambda each: each["dispatch_ms"] + each["combine_ms"])
    sent = max(each["sent_bytes"] for each in found)
    seconds = (slowest["dispatch_ms"] + slowest["combine_ms"]) / 1e3
    text = (
        f"{slowest['tokens']:.0f} tokens per node ({sizes['hidden']:,} x bfloat16, {sizes['top_k']} of {sizes['experts']} experts) "
        f"over gloo: dispatch {slowest['dispatch_ms']:.1f} ms, combine {slowest['combine_ms']:.1f} ms, "
        f"{sent / 1e6:.1f} MB sent per node ({sent * 8 / 1e9 / seconds:.1f} Gbit/s)"
    )
    if not all(each["is_right"] for each in found):
        return failure("dispatch", f"{text}, but the results are wrong", "test the memory and the network cards of the nodes")  # fmt: skip
    return ok("dispatch", f"{text}; the results are correct", dispatch_ms=slowest["dispatch_ms"], combine_ms=slowest["combine_ms"], sent_bytes=sent)  # fmt: skip


def sizes_of(directory: Path | None) -> dict[str, int]:
    """Return the dispatch dimensions of the model, or those of DeepSeek-V3 without a model."""
    if directory is None:
        return _DEEPSEEK_V3
    config = read_config(directory)
    top_k = experts_per_token(config)
    experts = max(1, num_experts(config))
    hidden = most(config, "hidden_size") or _DEEPSEEK_V3["hidden"]
    return {"hidden": hidden, "top_k": min(experts, top_k or _DEEPSEEK_V3["top_k"]), "experts": experts}


def tokens_of(max_num_batched_tokens: int | None) -> list[int]:
    """Return the tested numbers of tokens per node: a decode step's, and the largest of any step."""
    return [_DECODE_TOKENS, max_num_batched_tokens or _DECODE_TOKENS * 8]
