"""A fake of a rank's model: a KV memory that records who wrote each row, and a next token that depends on all rows.

The fake writes (position, token) rows into the blocks of a batch. It then reads a sequence's whole history back through
its block table. A row that is lost, shared incorrectly or overwritten is detected at once, and would change the tokens.
"""

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.blocks import BlockPool
from kvcache.states import NO_STATE, StatePool
from scheduler.policy.batch import Scheduled, StepBatch
from scheduler.policy.request import FinishReason, Logprobs, Request, RequestOutput
from scheduler.policy.scheduler import Scheduler
from scheduler.policy.sequence import Sequence, SequenceStatus

VOCABULARY = 7


def next_token(token_ids: list[int]) -> int:
    """Return a token that depends on every token before it."""
    digest = hashlib.blake2b(bytes(token_ids), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def serve_alone(request: Request, max_model_len: int) -> tuple[list[int], FinishReason]:
    """Return the correct output of a request by definition, without replayed tokens. The oracle."""
    generated: list[int] = []
    params = request.params
    while True:
        generated.append(next_token([*request.prompt_ids, *generated]))
        is_replayed = len(generated) <= len(request.replayed_ids)
        assert not is_replayed or generated[-1] == request.replayed_ids[len(generated) - 1]
        if generated[-1] in params.stop_token_ids and len(generated) > params.min_tokens:
            reason = FinishReason.STOP
        elif len(generated) == params.max_tokens or len(request.prompt_ids) + len(generated) >= max_model_len:
            reason = FinishReason.LENGTH
        else:
            continue
        return generated[len(request.replayed_ids) :], reason


@dataclass
class Launched:
    """A batch on the fake device, with its block tables as copied at launch."""

    batch: StepBatch
    tables: list[list[int]]

    def written_blocks(self, item_index: int, block_tokens: int) -> set[int]:
        item = self.batch.items[item_index]
        return set(self.tables[item_index][item.start // block_tokens : (item.end - 1) // block_tokens + 1])


class PlannedRank:
    """Runs a scheduler's batches, with up to `depth` planned at once, and checks every rule at each step."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        max_num_batched_tokens: int,
        states: StatePool | None = None,
        rotary_limit: int | None = None,
    ) -> None:
        self.pool, self.states, self.rotary_limit = pool, states, rotary_limit
        self.scheduler = scheduler
        self.max_num_batched_tokens = max_num_batched_tokens
        self.launched: deque[Launched] = deque()
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.tiers: Any = None  # a `FakeTiers`, if the scheduler uses one
        self.on_hand_over: Callable[[RequestOutput], None] = lambda _output: None
        self.num_scored = 0  # prompt tokens with computed logprobs
        # (block, row) -> (position, token, whether it ran as a decode), and whether it was computed as part of a long sequence.
        self._rows: dict[tuple[int, int], tuple[int, int, bool]] = {}
        self._is_long: dict[tuple[int, int], bool] = {}
        self._states: dict[int, list[int]] = {}  # slot -> the tokens that its state covers

    def rows(self, block_id: int) -> list[tuple[Any, bool]]:
        """Return what a block holds: each row, and whether it was computed as part of a long sequence. None if it was not written."""
        places = [(block_id, row) for row in range(self.pool.block_tokens)]
        return [(self._rows.get(place), self._is_long.get(place, False)) for place in places]

    def put_row(self, block_id: int, row: int, content: Any, *, is_long: bool) -> None:
        """Write a row from outside."""
        self._rows[block_id, row], self._is_long[block_id, row] = content, is_long

    def state(self, slot: int) -> list[int]:
        """Return the tokens that a slot's state covers."""
        return self._states[slot]

    def put_state(self, slot: int, token_ids: list[int]) -> None:
        """Write a state from outside."""
        self._states[slot] = list(token_ids)

    def lose_memory(self) -> None:
        """Lose the content of all blocks and states."""
        for content in (self._rows, self._is_long, self._states):
            content.clear()  # type: ignore[attr-defined]

    def collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            earlier = self.outputs.setdefault(output.request_id, [])
            assert all(one.finish_reason is None for one in earlier), "output was delivered after the end"
            earlier.append(output)
            if output.is_returned and output.token_ids:
                self.on_hand_over(output)

    def plan(self, prefill_budget: int | None = None, now_s: float = 0.0) -> StepBatch:
        promised = self.scheduler.next_step.num_decodes
        if self.tiers is not None:
            self.tiers.now_s = max(self.tiers.now_s, now_s)
        batch = self.scheduler.schedule(prefill_budget=prefill_budget, now_s=now_s)
        assert batch.num_tokens - batch.num_prefill_tokens <= promised, "more decode tokens than agreed"
        self._check_budgets(batch, prefill_budget)
        if batch.items:
            self.launched.append(Launched(batch, [list(item.sequence.block_ids) for item in batch.items]))
            widest = max(len(item.sequence.block_ids) for item in batch.items)
            most = self.pool.blocks_for(self.scheduler._limits.max_model_len)
            assert widest <= most, f"a sequence holds {widest} blocks; a step's tables hold at most {most}"
            self._check_writers()
        return batch

    def finish(self) -> None:
        """Run and commit the oldest planned batch."""
        launched = self.launched.popleft()
        items = zip(launched.batch.items, launched.tables, strict=True)
        token_ids = [token for item, table in items for token in self._run(item, table)]
        scored = {item.sequence.request.request_id: _scored(item) for item in launched.batch.items}
        self.num_scored += sum(map(len, scored.values()))
        self.collect(self.scheduler.commit(launched.batch, token_ids, [None] * len(token_ids), scored))

    def drain(self, max_steps: int = 5000) -> None:
        """Step until no work is left."""
        for number in range(max_steps):
            if self.launched:
                self.finish()
            elif self.scheduler.has_work:
                self.collect(self.scheduler.expire(float("-inf")))
                batch = self.plan(now_s=float(number))
                waits = bool(self.scheduler._roster.loading) or (self.tiers and self.tiers.num_open > 0)
                # The whole prompt of a request that continues may be cached. The next step runs its generated tokens.
                waits = waits or any(not each.is_prefilling for each in self.scheduler.running)
                assert batch.items or waits or not self.scheduler.has_work, (
                    "no step is planned although work is left"
                )
            else:
                break
        else:
            raise AssertionError("the scheduler does not finish")
        if self.tiers is not None:
            self.tiers.is_prompt = True
            self.scheduler.collect(0.0)
        assert self.pool.num_free == self.pool.num_blocks, "blocks leaked"
        if self.states is not None:
            assert self.states.num_left_over == self.states.num_slots, "states or their reservations leaked"

    def tokens_of(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def end_of(self, request_id: str) -> FinishReason | None:
        return self.outputs[request_id][-1].finish_reason

    def _run(self, item: Scheduled, table: list[int]) -> list[int]:
        """Write the item's rows. Return the tokens that its last rows sample."""
        size = self.pool.block_tokens
        is_ended = item.sequence.status is SequenceStatus.ENDED
        known = [*item.sequence.token_ids, *item.drafts]
        known += [0] * (item.end if is_ended else 0)  # a pending token may never arrive
        for position in range(item.start, item.end):
            place = table[position // size], position % size
            is_decode = item.start >= item.sequence.num_prefill_tokens
            self._rows[place] = position, known[position], is_decode
            self._is_long[place] = item.sequence.is_long
        history = [self._rows[table[position // size], position % size] for position in range(item.end)]
        text = [each[1] for each in history]
        assert is_ended or [each[:2] for each in history] == list(enumerate(known[: item.end])), (
            "a sequence read rows of another"
        )
        if self.scheduler._limits.repeats_decodes:
            num_prompt = item.sequence.num_prompt_tokens
            assert is_ended or all(each[2] == (each[0] >= num_prompt) for each in history), (
                "a prompt's token ran as a decode, or a generated one as a prompt"
            )
        ways = {self._is_long[table[position // size], position % size] for position in range(item.end)}
        assert len(ways) == 1, "a sequence mixes rows of long and short computation"
        if item.samples:
            is_long = self.rotary_limit is not None and item.end > self.rotary_limit
            assert is_ended or ways == {is_long}
        for _ in range(2):  # an interrupted step is run again
            self._run_states(item, known)
        return [next_token(text[: item.end - back]) for back in range(item.num_samples - 1, -1, -1)]

    def _run_states(self, item: Scheduled, known: list[int]) -> None:
        assert bool(item.pieces) == (self.states is not None)
        position = item.start
        for piece in item.pieces:
            before = [] if piece.read == NO_STATE else self._states[piece.read]
            assert len(before) == position, "the state belongs to another position"
            position += piece.length
            is_whole = before == known[: len(before)] or item.sequence.status is SequenceStatus.ENDED
            assert is_whole, "a sequence continues from the state of another one"
            self._states[piece.write] = known[:position]
        assert position == item.end or not item.pieces
        drafted = [piece.length for piece in item.pieces[-1 - len(item.drafts) :]]
        assert not item.drafts or not item.pieces or drafted == [1] * (1 + len(item.drafts))

    def _check_budgets(self, batch: StepBatch, prefill_budget: int | None) -> None:
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items) <= self.max_num_batched_tokens
        exceeds = prefill_budget is not None and batch.num_prefill_tokens > prefill_budget
        assert not exceeds or (prefill_budget and self.scheduler._limits.keeps_images_whole)
        assert len({id(item.sequence) for item in batch.items}) == len(batch.items)
        assert all(item.num_tokens > 0 for item in batch.items)
        limits, drafter = self.scheduler._limits, self.scheduler._drafter
        whole = [item.samples or item.end >= item.sequence.num_prefill_tokens for item in batch.items[:-1]]
        assert all(whole), "only the last prompt may be left unfinished"
        assert limits.repeats_decodes or all(item.samples for item in batch.items[:-1])
        num_prompts = sum(item.start < item.sequence.num_prefill_tokens for item in batch.items)
        most_rows = limits.max_num_seqs * (1 + (drafter.num_drafts if drafter else 0))
        assert batch.num_decode_tokens + num_prompts <= most_rows, "a GPU's step has too many sequences"

    def _check_writers(self) -> None:
        """Check that no block has two writers, is written while shared, or is written after publication."""
        writer_of: dict[int, Sequence] = {}
        for launched in self.launched:
            for index, item in enumerate(launched.batch.items):
                for block_id in launched.written_blocks(index, self.pool.block_tokens):
                    assert self.pool.num_holders(block_id) == 1, f"block {block_id} is written while shared"
                    assert not self.pool.is_published(block_id), (
                        f"block {block_id} is written after publication"
                    )
                    assert writer_of.setdefault(block_id, item.sequence) is item.sequence
        written = [
            piece.write
            for launched in self.launched
            for item in launched.batch.items
            for piece in item.pieces
        ]
        assert len(written) == len(set(written)), "a state slot is written twice"


def prompt_logprobs_of(request: Request) -> list[Logprobs]:
    """Return the logprobs that a request for prompt logprobs must get."""
    return [
        _logprobs_at(list(request.prompt_ids), position) for position in range(1, len(request.prompt_ids))
    ]


def _scored(item: Scheduled) -> list[Logprobs]:
    """Return the logprobs of the prompt tokens after the item's rows, if the sequence requests them."""
    sequence = item.sequence
    return [
        _logprobs_at(sequence.token_ids, position + 1) for position in sequence.unscored(item.start, item.end)
    ]


def _logprobs_at(token_ids: list[int], position: int) -> Logprobs:
    return Logprobs(token_ids[position], -0.5 * next_token(token_ids[:position]), [], [], position)
