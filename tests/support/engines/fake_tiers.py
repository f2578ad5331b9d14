"""Fake tiers of a rank, over the memory of a `PlannedRank`. They copy and lose records when a test wants it.

A save reads its block as late as possible, so a block that is reused too early is noticed. Records vanish and loads stop early,
as they do in tiers that other processes share.
"""

import random
from typing import Any

from kvcache.tiers.figures import TierFigures
from kvcache.tiers.jobs import FetchJob, LoadJob, SaveJob
from tests.support.models.fake_model import PlannedRank


class FakeTiers:
    """A `KeepsTiers`. `finished` ends some of the open jobs, in order within each kind of job."""

    def __init__(
        self, rank: PlannedRank, seed: int, *, loss: float = 0.2, shared: "FakeTiers | None" = None
    ) -> None:
        """`shared`: tiers of another rank of the host, with the same records."""
        self.rank, self._random, self._loss = rank, random.Random(seed), loss
        self.figures = TierFigures()
        self.generation = 0
        self.prompt_token_s = 0.0
        self.hangs = False  # a load does not stop
        self.is_prompt = False  # end all jobs at once
        self.chance = 0.5  # that `finished` ends the next job, otherwise
        self.now_s = 0.0  # for loads that follow another rank
        self._blocks: dict[bytes, Any] = shared._blocks if shared else {}
        self._states: dict[bytes, list[int]] = shared._states if shared else {}
        self._saves: list[tuple[SaveJob, Any]] = []  # with the content when the save was ordered
        self._loads: list[LoadJob] = []
        self._stopped: list[LoadJob] = []  # before they began
        self._follows: list[LoadJob] = []  # loads that wait for what other ranks save
        self._fetches: list[FetchJob] = []
        # Another node has everything that was saved, as `_blocks` and `_states`.
        self.remote_blocks: dict[bytes, Any] = {}
        self.remote_states: dict[bytes, list[int]] = {}
        self.has_peers = True  # only requests that name the other node fetch
        self.num_fetches = 0
        self.num_loads = 0

    @property
    def secret(self) -> bytes:
        return self.generation.to_bytes(16, "little")

    @property
    def num_open(self) -> int:
        jobs: list[list[Any]] = [self._saves, self._loads, self._stopped, self._follows, self._fetches]
        return sum(map(len, jobs))

    def has(self, key: bytes, *, is_state: bool = False) -> bool:
        return key in (self._states if is_state else self._blocks)

    def save(self, save: SaveJob) -> None:
        self._saves.append((save, self._content(save.index, is_state=save.is_state)))

    def load(self, load: LoadJob) -> None:
        assert load.keys or load.state_key, "a load of nothing"
        (self._follows if load.until_s else self._loads).append(load)
        self.num_loads += 1

    def stop(self, load: LoadJob) -> None:
        load.should_stop = True
        if load in self._loads[1:]:  # the first one has begun
            self._loads.remove(load)
            self._stopped.append(load)

    def lose_all(self) -> None:
        """Forget the records here. The other node keeps them."""
        self._blocks.clear()
        self._states.clear()

    def fetch(self, fetch: FetchJob) -> None:
        assert fetch.token_ids and fetch.address, "a fetch of nothing, or from nowhere"
        self._fetches.append(fetch)
        self.num_fetches += 1

    def forget(self, generation: int) -> None:
        self.generation = max(self.generation, generation)

    def note(self, **counts: float) -> None:
        present = self.figures._asdict()
        self.figures = self.figures._replace(
            **{name: present[name] + count for name, count in counts.items()}
        )

    def finished(self) -> list[SaveJob | LoadJob | FetchJob]:
        done: list[SaveJob | LoadJob | FetchJob] = [*self._stopped]
        self._stopped.clear()
        while self._saves and self._is_time():
            save, content = self._saves.pop(0)
            assert self._content(save.index, is_state=save.is_state) == content, (
                "a record changed while it was saved"
            )
            (self._states if save.is_state else self._blocks)[save.key] = content
            (self.remote_states if save.is_state else self.remote_blocks)[save.key] = content
            done.append(save)
        while self._loads and (self._is_time() or (self._loads[0].should_stop and not self.hangs)):
            done.append(self._fill(self._loads.pop(0)))
        for load in list(self._follows) if self.chance else []:
            while load.is_open and load.keys[load.num_loaded] in self._blocks:
                self._fill_next(load)
            is_over = self.is_prompt or load.until_s <= self.now_s + 1e-6
            if not load.is_open or is_over:
                self._follows.remove(load)
                done.append(load)
        while self._fetches and self._is_time():
            done.append(self._copy(self._fetches.pop(0)))
        return done

    def _copy(self, fetch: FetchJob) -> FetchJob:
        """Take over what the other node has of a prefix, up to a record that is lost on the way."""
        for key in self.rank.pool.keys_of(fetch.token_ids, fetch.root):
            if key in self.remote_states:
                self._states.setdefault(key, self.remote_states[key])
            if key in self._blocks:
                continue
            if key not in self.remote_blocks or self._random.random() < self._loss:
                break
            self._blocks[key] = self.remote_blocks[key]
            fetch.keys.add(key)
        return fetch

    def _is_time(self) -> bool:
        return self.is_prompt or self._random.random() < self.chance

    def _fill_next(self, load: LoadJob) -> None:
        rows = self._blocks[load.keys[load.num_loaded]]
        for row, (content, is_long) in enumerate(rows):
            self.rank.put_row(load.block_ids[load.num_loaded], row, content, is_long=is_long)
        load.num_loaded += 1
        load.sources.append("host")

    def fill(self, num_blocks: int) -> None:
        """Load the next blocks of the load that began first. It stays open."""
        for _ in range(num_blocks):
            self._fill_next(self._loads[0])

    def _fill(self, load: LoadJob) -> LoadJob:
        blocks = list(zip(load.keys, load.block_ids, strict=True))
        for key, block_id in blocks[load.num_loaded :]:
            if load.should_stop:
                return load
            rows = self._blocks.get(key)
            for row in range(self.rank.pool.block_tokens):  # the block is written in any case
                self.rank.put_row(block_id, row, ("damaged", key), is_long=False)
            if rows is None or self._random.random() < self._loss:
                self._blocks.pop(key, None)
                break
            for row, (content, is_long) in enumerate(rows):
                self.rank.put_row(block_id, row, content, is_long=is_long)
            load.num_loaded += 1
            load.sources.append("host")
        if load.state_key is not None and not load.should_stop:
            self.rank.put_state(load.slot, [-1])
            state = self._states.get(load.state_key)
            if state is not None and self._random.random() >= self._loss:
                self.rank.put_state(load.slot, state)
                load.has_state = True
        return load

    def _content(self, index: int, *, is_state: bool) -> Any:
        return list(self.rank.state(index)) if is_state else self.rank.rows(index)
