"""A rank without a model: in every step each of its requests gets one token, at a pace set by the caller.

It uses the real link to the front, so benchmarks and tests with it measure the front. The tokens are predictable (the prompt's
tokens, repeated), blocks are counted as in a real rank, and an aborted request is dropped at the next step. It does not import
torch. Run as a module it is a separate process, so that its CPU time does not count for the measuring process:
`python -m benchmarks.serving.paced_rank RANK WORLD_SIZE ADDRESS`, with the token in $PACED_RANK_TOKEN.
"""

import argparse
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from expert_placement.placement import Placement
from scheduler.policy.request import (
    FinishReason,
    Logprobs,
    MemoryOrder,
    RankStats,
    Request,
    RequestOutput,
    Withdraw,
)
from server.link.messages import (
    Abort,
    ExpertsRead,
    MemorySwitched,
    Prepare,
    RankFacts,
    ReadExperts,
    Served,
    StepOutput,
    Stop,
    Submit,
    ToRank,
)
from server.link.rank_link import FrontLost, RankLink
from server.machine.parent_death import die_with_parent

TOKEN_VARIABLE = "PACED_RANK_TOKEN"
OPEN_TIMEOUT_S = 60.0
BLOCK_TOKENS = 16
NUM_BLOCKS = 1 << 16
LOOK_AGAIN_S = 0.002  # after a step in which no request could advance


@dataclass(slots=True)
class OpenRequest:
    """An open request."""

    request: Request
    num_done: int = 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that a real rank would hold for it now."""
        return -(-(len(self.request.prompt_ids) + self.num_done) // BLOCK_TOKENS)


def token_of(request: Request, place: int) -> int:
    """Return the answer's token at a position: the prompt is repeated."""
    return request.prompt_ids[place % len(request.prompt_ids)]


class PacedRank:
    """One rank of a service, attached from `open` to `close`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        token: str,
        *,
        max_model_len: int,
        num_restarts: int = 0,
        loaded: Served | None = None,
        step_s: float = 0.0,
        most_tokens: int | None = None,
        max_num_seqs: int = 1 << 12,
        after_step: Callable[["PacedRank", int], None] = lambda _rank, _step: None,
        on_prepare: Callable[["PacedRank", Placement], None] = lambda _rank, _placement: None,
    ) -> None:
        """Prepare the rank; nothing runs before `open`.

        Args:
            num_restarts: Number of restarts of this rank.
            loaded: The placement with which it was restarted, or joins.
            step_s: Shortest time between the starts of two steps.
            most_tokens: End answers with a stop after this number of tokens; by default only max_tokens ends them.
            max_num_seqs: Number of concurrent requests that the rank reports. It runs all requests it gets.
            after_step: Called with the step's number when its outputs are queued.
            on_prepare: Called when the front requests another placement.
        """
        self.rank, self.num_steps, self.num_aborted = rank, 0, 0
        self._step_s, self._most_tokens, self._after_step = step_s, most_tokens, after_step
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._open: dict[str, OpenRequest] = {}
        self._facts = facts = RankFacts(
            rank=rank,
            world_size=world_size,
            host="localhost",
            pid=os.getpid(),
            max_model_len=max_model_len,
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=1 << 12,
            device="cpu",
            num_restarts=num_restarts,
            loaded=loaded,
        )
        self.link = RankLink(address, token, facts, self.receive)
        self._on_prepare = on_prepare
        self._stepping = threading.Thread(target=self._run, name=f"paced-rank-{rank}", daemon=True)

    def open(self) -> Self:
        """Attach to the front and start to step."""
        self.link.open(OPEN_TIMEOUT_S)
        self._stepping.start()
        return self

    def close(self, reason: str = "") -> None:
        """Detach; open requests get no more tokens."""
        self._end()
        self.link.close(reason)
        if self._stepping.is_alive() and self._stepping is not threading.current_thread():
            self._stepping.join(OPEN_TIMEOUT_S)

    def _end(self) -> None:
        with self._changed:
            self._ended.set()
            self._changed.notify_all()

    def wait_ended(self) -> None:
        """Wait until the front ends the rank, or is gone."""
        self._ended.wait()

    @property
    def num_open(self) -> int:
        """Number of open requests."""
        return len(self._open)

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that no request holds."""
        with self._changed:
            return NUM_BLOCKS - sum(each.num_blocks for each in self._open.values())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is open. Return whether that happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def receive(self, message: ToRank | FrontLost) -> None:
        """Handle a message of the front. Orders have no effect: the rank has no peers and no prefix cache."""
        match message:
            case Submit():
                request = message.request_at(time.monotonic())
                with self._changed:
                    self._open[request.request_id] = OpenRequest(request, len(request.replayed_ids))
                    self._changed.notify_all()
            case Abort(request_id):
                with self._changed:
                    self.num_aborted += self._open.pop(request_id, None) is not None
                    self._changed.notify_all()
            case Withdraw(request_id, even_if_begun):
                self._withdraw(request_id, even_if_begun=even_if_begun)
            case Prepare(placement):
                self._on_prepare(self, placement)
            case ReadExperts(placement):
                self.link.send(ExpertsRead(placement.version, ""))
            case MemoryOrder(number):
                self.link.send(MemorySwitched(number))
            case Stop():
                self.close()
            case FrontLost():
                self._end()

    def _withdraw(self, request_id: str, *, even_if_begun: bool) -> None:
        """Return a request in any case, or only if this rank has not generated a token for it yet."""
        with self._changed:
            each = self._open.get(request_id)
            if each is None:
                return
            is_returned = even_if_begun or each.num_done == len(each.request.replayed_ids)
            if is_returned:
                del self._open[request_id]
            output = RequestOutput(request_id=request_id, token_ids=[], is_returned=is_returned)
            self.link.send(StepOutput([output], None))  # behind the tokens of the last step
            self._changed.notify_all()

    def _run(self) -> None:
        due_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._open or self._ended.is_set())
            due_s = max(due_s + self._step_s, time.monotonic())
            if self._ended.wait(max(0.0, due_s - time.monotonic()) if self._step_s else 0.0):
                return
            self._step()

    def _step(self) -> None:
        with self._changed:
            self.num_steps += 1
            advanced = [self._advance(each) for each in self._open.values()]
            outputs = [output for output in advanced if output is not None]
            for output in outputs:
                hands_over = self._open[output.request_id].request.hands_over
                output.is_returned = hands_over and bool(output.token_ids) and output.finish_reason is None
                if output.finish_reason is not None or output.is_returned:
                    del self._open[output.request_id]
            if outputs and not self._ended.is_set():
                self._send(outputs, self._stats(len(outputs)))
            self._changed.notify_all()
        if self._ended.is_set():
            return
        if outputs:
            self._after_step(self, self.num_steps)
        else:
            self._ended.wait(LOOK_AGAIN_S)

    def _send(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        self.link.send(StepOutput(outputs, stats))

    def _advance(self, each: OpenRequest) -> RequestOutput | None:
        """Return a request's next token, or None if it gets none in this step."""
        request, params = each.request, each.request.params
        token = token_of(request, each.num_done)
        each.num_done += 1
        finish = FinishReason.LENGTH if each.num_done >= params.max_tokens else None
        if finish is None and self._most_tokens is not None and each.num_done >= self._most_tokens:
            finish = FinishReason.STOP
        return RequestOutput(
            request_id=request.request_id,
            token_ids=[token],
            logprobs=[] if params.num_logprobs is None else [logprobs_of(token, params.num_logprobs)],
            prompt_logprobs=prompt_logprobs_of(request) if each.num_done == 1 else [],
            finish_reason=finish,
        )

    def _stats(self, num_step_tokens: int) -> RankStats:
        return RankStats(
            rank=self.rank,
            step=self.num_steps,
            num_running=self.num_open,
            num_waiting=0,
            num_free_blocks=self.num_free_blocks,
            num_blocks=NUM_BLOCKS,
            num_step_tokens=num_step_tokens,
            num_preemptions=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
        )


class PacedRankOfFronts(PacedRank):
    """One rank of a service with several fronts."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        address: str,
        token: str,
        *,
        more_addresses: Sequence[str],
        **how: Any,
    ) -> None:
        """Args: address is that of the leading front, more_addresses those of the others."""
        super().__init__(rank, world_size, address, token, **how)
        self._owners: dict[str, RankLink] = {}  # of open requests; none for those of the leading front
        self._others: list[RankLink] = []
        for at, each in enumerate(more_addresses):
            self._others.append(RankLink(each, token, self._facts, functools.partial(self._receive_from, at)))

    def open(self) -> Self:
        for link in self._others:
            link.open(OPEN_TIMEOUT_S)
        return super().open()

    def close(self, reason: str = "") -> None:
        for link in self._others:
            link.close(reason)
        super().close(reason)

    def _receive_from(self, at: int, message: ToRank | FrontLost) -> None:
        if isinstance(message, Submit):
            self._owners[message.request.request_id] = self._others[at]
        if not isinstance(message, FrontLost):
            self.receive(message)

    def _send(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        by_link: dict[RankLink, list[RequestOutput]] = {}
        for output in outputs:
            by_link.setdefault(self._owners.get(output.request_id, self.link), []).append(output)
            if output.finish_reason is not None or output.is_returned:
                self._owners.pop(output.request_id, None)
        for link, own in by_link.items():
            link.send(StepOutput(own, stats))


def logprobs_of(token: int, num_top: int) -> Logprobs:
    """Return logprobs with the chosen token as the likeliest; each following id is half as likely."""
    tops = [token + place for place in range(num_top)]
    return Logprobs(token, -0.5, tops, [-0.5 - 0.693 * place for place in range(num_top)])


def prompt_logprobs_of(request: Request) -> list[Logprobs]:
    """Return requested logprobs of prompt tokens from 1 on: the same as for generated ones, with rank 1."""
    num_top = request.params.num_prompt_logprobs
    if num_top is None:
        return []
    return [logprobs_of(token, num_top)._replace(rank=1) for token in request.prompt_ids[1:]]


def main(arguments: list[str] | None = None) -> int:
    """Serve until the front ends; return the exit status."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.paced_rank", allow_abbrev=False)
    for name, kind in (("rank", int), ("world_size", int), ("address", str)):
        parser.add_argument(name, type=kind)
    parser.add_argument("more_addresses", nargs="*", help="of the other fronts")
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    args = parser.parse_args(arguments)
    how: dict[str, Any] = {"max_model_len": args.max_model_len, "step_s": args.step_s}
    place = args.rank, args.world_size, args.address, os.environ[TOKEN_VARIABLE]
    if args.more_addresses:
        rank: PacedRank = PacedRankOfFronts(*place, more_addresses=args.more_addresses, **how).open()
    else:
        rank = PacedRank(*place, **how).open()
    rank.wait_ended()
    rank.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
