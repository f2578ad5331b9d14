"""A rank's use of its KV tiers: which blocks are saved, and which prefixes are loaded before their requests start.

Full blocks are saved as they are published, and states as they become snapshots. A block or slot stays as it is until its
job is done; if too many jobs are open, blocks are left out until there is room, in order, because a prefix is of no use without its
beginning. A loaded prefix becomes an ordinary cached prefix: its blocks are published and released, and the request finds them
when it is seated. So no other part of the scheduler knows tiers, and a load that fails or comes late changes no answer.

A request is looked up once before each start, when its turn comes, or while it is the next to start and all seats are taken. One
that has begun before, here or on another rank, is looked up at once. While its prefix loads, others may pass it. A load that lasts
longer than `MOST_LOAD_S` goes on, up to `MOST_LONG_LOAD_S`, while it gets blocks and is predicted to be faster than computing what
is left. Otherwise it stops, and the request starts with the blocks that are there. If the thread hangs, they come back when it is
done with them.

If another node probably has a request's prefix, what this node lacks is fetched as soon as the request arrives. It holds no block.
The fetched blocks are in host memory when the request is looked up.

If another rank hands a request over, its last blocks may still be on their way to the tiers. The request waits for them before it
is looked up, at most `MOST_AWAIT_S`. On another node, the server of that node waits for them.

A rank that expects a request loads its blocks while the other rank computes them or releases it, so that few are left when it
arrives. It takes blocks for this only while it has twice as many free, and gives them back if the request does not come.
When a request ends, its loads stop.
The last block of a request that moves need not be full (`scheduler.policy.tails`).
"""

from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from kvcache.blocks import BlockPool
from kvcache.states import StatePool
from kvcache.tiers.figures import TierFigures
from kvcache.tiers.jobs import MOST_LOAD_S, FetchJob, LoadJob, SaveJob
from scheduler.policy.sequence import Sequence, SequenceStatus
from scheduler.policy.tails import Tail, Tails

MOST_AWAIT_S = 0.5
MOST_JOIN_S = 0.02  # for blocks of a rank that saves nothing more: those that are missing were left out
MOST_EXPECT_S = 60.0  # for a prompt on another rank
MOST_LONG_LOAD_S = 15.0  # a bound, because the prediction may be wrong
LOOK_AGAIN_S = 1.0  # at a load that goes on after `MOST_LOAD_S`
_STOP_S = 0.25  # of `MOST_LOAD_S`, for the block that is being copied when a load stops
SHARE_OF_SAVES = 4  # saves hold at most a fourth of the blocks, or of the slots


class KeepsTiers(Protocol):
    """Copies records to tiers and back; implemented by `kvcache.tiers.tiers.Tiers`, which explains the methods."""

    @property
    def figures(self) -> TierFigures: ...

    @property
    def secret(self) -> bytes: ...

    @property
    def has_peers(self) -> bool: ...

    def has(self, key: bytes, *, is_state: bool = False) -> bool: ...

    def save(self, save: SaveJob) -> None: ...

    def load(self, load: LoadJob) -> None: ...

    def stop(self, load: LoadJob) -> None: ...

    def fetch(self, fetch: FetchJob) -> None: ...

    def finished(self) -> list[SaveJob | LoadJob | FetchJob]: ...

    @property
    def prompt_token_s(self) -> float: ...

    def forget(self, generation: int) -> None: ...

    def note(self, **counts: float) -> None: ...


class _Progress(NamedTuple):
    """How far a load was when it was last looked at."""

    begun_s: float
    since_s: float
    until_s: float  # when to look again
    num_blocks: int = 0

    @classmethod
    def begin(cls, now_s: float, num_blocks: int = 0) -> "_Progress":
        """Return the progress of a load that its request waits for from now on."""
        return cls(now_s, now_s, now_s + MOST_LOAD_S - _STOP_S, num_blocks)

    def after(self, num_blocks: int, num_left: int, compute_s: float, now_s: float) -> "_Progress | None":
        """Return the progress now, or None if the load should stop.

        It should if no block has come since the last look, if it lasts too long, or if computing is predicted to take less time.

        Args:
            num_blocks: Blocks that are there.
            num_left: Blocks that are missing.
            compute_s: Time to compute what a stop leaves missing or makes useless. 0 if it is unknown.
        """
        num_new = num_blocks - self.num_blocks
        left_s = (now_s - self.since_s) * num_left / num_new if num_new else float("inf")
        if left_s > compute_s or now_s - self.begun_s > MOST_LONG_LOAD_S:
            return None
        return self._replace(since_s=now_s, until_s=now_s + LOOK_AGAIN_S, num_blocks=num_blocks)


class _Loading(NamedTuple):
    """A sequence that waits for a load."""

    sequence: Sequence
    num_admissions: int  # of the sequence when the load began
    matched: list[int]  # cached blocks before the loaded ones; held
    root: bytes
    token_ids: list[int]  # of the loaded blocks
    progress: _Progress
    secret: bytes
    tail_end: int = 0  # `Tail.end`, if the last block is one


class _Fetching(NamedTuple):
    """A sequence with a prefix that is fetched from another node."""

    sequence: Sequence
    until_s: float


class _Awaited(NamedTuple):
    """What a sequence waits for."""

    key: bytes  # of the last block that another rank is saving
    until_s: float


class TierTables:
    """The jobs of one rank's tiers. Only the scheduler's thread uses it."""

    def __init__(
        self,
        tiers: KeepsTiers,
        pool: BlockPool,
        states: StatePool | None,
        slots_in_flight: Callable[[], Collection[int]],
    ) -> None:
        """`slots_in_flight`: returns the state slots that steps in flight read. No load may write them."""
        self._tiers, self._pool, self._states = tiers, pool, states
        self._slots_in_flight = slots_in_flight
        self._loads: dict[LoadJob, _Loading] = {}
        self._fetches: dict[FetchJob, _Fetching] = {}
        self._awaited: dict[Sequence, _Awaited] = {}
        self._expected: dict[str, LoadJob] = {}  # by id of a request that has not begun here
        self._arrived: list[LoadJob] = []  # of requests that came since the last `collect`
        self.tails = Tails(pool)
        self._saved_states: set[bytes] = set()  # keys of states with open saves
        self._num_saves = {False: 0, True: 0}  # open ones: of blocks, and of states
        self._most_saves = {
            False: max(1, pool.num_blocks // SHARE_OF_SAVES),
            True: max(1, states.num_slots // SHARE_OF_SAVES) if states else 0,
        }

    @property
    def figures(self) -> TierFigures:
        """What the tiers did."""
        return self._tiers.figures

    @property
    def has_jobs(self) -> bool:
        """Whether a save or a load was not taken back yet, or a loaded block is kept."""
        return bool(self._loads or self.tails or any(self._num_saves.values()))

    def offer_blocks(self, sequence: Sequence, num_published: int, *, is_bounded: bool = True) -> None:
        """Save the sequence's first blocks, up to `num_published`, that were not offered before.

        `is_bounded`: whether to leave out blocks if too many saves are open.
        """
        most_saves = self._most_saves[False] if is_bounded else self._pool.num_blocks
        while sequence.num_offered < num_published and self._num_saves[False] < most_saves:
            block_id = sequence.block_ids[sequence.num_offered]
            if self._pool.pin(block_id):
                self._num_saves[False] += 1
                self._tiers.save(SaveJob(block_id, self._pool.key_of(block_id)))
            sequence.num_offered += 1

    def offer_last_blocks(self, sequence: Sequence) -> None:
        """Save what is left of a sequence that no longer runs. Count the blocks that find no room."""
        num_published = min(sequence.num_computed, sequence.num_prefillable) // self._pool.block_tokens
        self.offer_blocks(sequence, num_published)
        self._tiers.note(num_dropped=max(0, num_published - sequence.num_offered))

    def offer_tail(self, sequence: Sequence) -> bool:
        """Save the last block of a sequence that another rank continues, if all tokens but its last one are computed and
        the block is not full. Returns whether it is saved."""
        pool, end = self._pool, sequence.num_computed
        at, num_tokens = divmod(end, pool.block_tokens)
        is_whole = end == len(sequence.token_ids) - 1 and end <= sequence.num_prefillable
        if self._states is not None or not num_tokens or not is_whole:
            return False
        key = self.tails.key_of(sequence, at, end)
        pool.pin(sequence.block_ids[at])
        self._num_saves[False] += 1
        self._tiers.save(SaveJob(sequence.block_ids[at], key, is_tail=True))
        return True

    def offer_state(self, slot: int, key: bytes) -> None:
        """Save a published snapshot that no promise depends on."""
        states = self._states
        assert states is not None, "the model keeps no states"
        if self._num_saves[True] < self._most_saves[True] and states.begin(slot, 0):
            self._num_saves[True] += 1
            self._saved_states.add(key)
            self._tiers.save(SaveJob(slot, key, is_state=True))

    def fetch(self, sequence: Sequence, num_shareable: int, now_s: float) -> None:
        """Begin to fetch a new sequence's prefix from the node that its request names.

        Args:
            num_shareable: As for `look`.
        """
        pool, token_ids, root = self._pool, sequence.key_ids, sequence.root_key
        num_blocks = num_shareable // pool.block_tokens
        num_awaited, sequence.num_awaited_tokens = sequence.num_awaited_tokens // pool.block_tokens, 0
        if not num_blocks or not self._tiers.has_peers:
            return
        matched = pool.match(token_ids[:num_shareable], root)
        newest_state = 0
        if self._states is not None:
            newest_state = self._states.find([pool.key_of(block_id) for block_id in matched]).num_blocks
        if num_blocks == (len(matched) if self._states is None else newest_state):
            return
        fetch = FetchJob(
            sequence.request.prefix_at,
            token_ids[: num_blocks * pool.block_tokens],
            root,
            num_cached=len(matched),
            newest_state=newest_state,
            num_awaited=min(num_blocks, num_awaited),
        )
        sequence.fetch = fetch
        self._fetches[fetch] = _Fetching(sequence, now_s + MOST_LOAD_S)
        self._tiers.fetch(fetch)

    def keeps_state(self, key: bytes) -> bool:
        """Whether a state is in a tier, or will be."""
        return key in self._saved_states or self._tiers.has(key, is_state=True)

    def look(self, sequence: Sequence, num_shareable: int, num_spare: int, now_s: float) -> bool:
        """Begin to load what continues the sequence's cached prefix, if a tier has it. Returns whether it loads or is fetched.

        Args:
            num_shareable: Number of tokens that need not be computed if they are cached.
            num_spare: Number of blocks that must stay free.
        """
        if sequence.fetch in self._fetches:
            sequence.is_loading = True
            return True
        if sequence.num_looked == sequence.num_admissions + 1:
            return False
        if self._expected and self._joins_expected(sequence, num_shareable, now_s):
            return True
        pool, token_ids, root = self._pool, sequence.key_ids, sequence.root_key
        if pool.blocks_for(len(token_ids)) + num_spare > pool.num_free:
            return False  # it cannot start yet; it is looked up when it can
        num_blocks = num_shareable // pool.block_tokens
        num_awaited = min(num_blocks, sequence.num_awaited_tokens // pool.block_tokens)
        if num_awaited and self._awaits(sequence, num_awaited, now_s):
            return True
        sequence.num_looked = sequence.num_admissions + 1
        matched = pool.match(token_ids[:num_shareable], root)
        # Another rank of this host is saving all that need not be computed, so also the tail.
        is_saved = sequence.request.num_awaited_tokens == num_shareable and not sequence.request.prefix_at
        tail_end = num_shareable if is_saved else 0
        has_tail = tail_end % pool.block_tokens > 0 and self.tails.end_of(sequence) != tail_end
        is_cached = len(matched) == num_blocks and self._states is None
        if not has_tail and (is_cached or not num_blocks):
            return False
        self._tiers.note(num_lookups=1)
        size, keys = pool.block_tokens, pool.keys_of(token_ids[:num_shareable], root, with_tail=has_tail)
        load = None if is_cached else self._find(keys[:num_blocks], len(matched))
        num_found = len(matched) + (len(load.keys) if load else 0)
        has_tail = has_tail and num_found == num_blocks
        if has_tail:
            load = LoadJob(keys[len(matched) :], until_s=now_s + MOST_AWAIT_S)
        if load is None:
            return False
        pool.share(matched)
        load.block_ids = pool.acquire(len(load.keys))
        self._loads[load] = _Loading(
            sequence, sequence.num_admissions, matched, root, token_ids[len(matched) * size : num_found * size],
            _Progress.begin(now_s), self._tiers.secret, tail_end if has_tail else 0,
        )  # fmt: skip
        sequence.is_loading = True
        self._tiers.load(load)
        return True

    def expect(self, sequence: Sequence, now_s: float) -> None:
        """Begin to load the blocks of a request that another rank runs and will hand over, with one token more than now."""
        pool, token_ids, root = self._pool, sequence.key_ids, sequence.root_key
        size, num_shareable = pool.block_tokens, sequence.num_prefillable
        num_blocks = num_shareable // size
        matched = pool.match(token_ids[:num_shareable], root)
        has_tail = self._states is None and num_shareable == len(token_ids) and num_shareable % size > 0
        tail_end = num_shareable if has_tail else 0
        num_loads = num_blocks - len(matched) + has_tail
        if num_loads <= 0 or sequence.request.request_id in self._expected:
            return
        pool.share(matched)  # blocks without a holder count as free until now
        if 2 * num_loads > pool.num_free:
            pool.release(matched)
            return
        keys = pool.keys_of(token_ids[:num_shareable], root, with_tail=has_tail)
        load = LoadJob(keys[len(matched) :], pool.acquire(num_loads), until_s=now_s + MOST_EXPECT_S)
        self._expected[sequence.request.request_id] = load
        self._loads[load] = _Loading(
            sequence, sequence.num_admissions, matched, root, token_ids[len(matched) * size : num_blocks * size],
            _Progress.begin(now_s), self._tiers.secret, tail_end,
        )  # fmt: skip
        self._tiers.load(load)

    def expect_no_more(self, request_id: str) -> None:
        """Give back the blocks of a request that is not handed over to this rank."""
        load = self._expected.pop(request_id, None)
        if load is not None:
            self._tiers.stop(load)
        self.tails.drop(request_id)

    def note_arrival(self, request_id: str) -> None:
        """Bound the time of what loads for a request that has come: its other rank saves nothing more."""
        if (load := self._expected.get(request_id)) is not None:
            self._arrived.append(load)

    def note_end(self, sequence: Sequence) -> None:
        """Stop the loads of a request that has ended or leaves the rank. Loaded blocks stay cached, except its tail."""
        self.expect_no_more(sequence.request.request_id)
        for load, loading in self._loads.items():
            if loading.sequence is sequence:
                self._tiers.stop(load)

    def give_way(self) -> None:
        """Give back the blocks of all expected requests, because one that has come needs them or the memory is released."""
        for load in self._expected.values():
            self._tiers.stop(load)
        self.tails.drop_all()

    def _joins_expected(self, sequence: Sequence, num_shareable: int, now_s: float) -> bool:
        """Let a request that was expected wait for the rest of its blocks. Returns whether it waits."""
        load = self._expected.pop(sequence.request.request_id, None)
        if load is None or load not in self._loads:
            return False
        most_s = MOST_AWAIT_S if sequence.num_awaited_tokens else MOST_JOIN_S
        # Its last rank may have computed more tokens, or fewer, than were announced.
        num_saved, tail_end = sequence.num_awaited_tokens or num_shareable, self._loads[load].tail_end
        if tail_end != num_saved:
            num_full = num_saved // self._pool.block_tokens - len(self._loads[load].matched)
            load.num_unwanted = len(load.keys) - min(num_full, len(load.keys) - bool(tail_end))
        sequence.num_awaited_tokens = 0  # it does not wait for them twice
        load.until_s = min(load.until_s, now_s + most_s)
        self._loads[load] = self._loads[load]._replace(
            sequence=sequence,
            num_admissions=sequence.num_admissions,
            progress=_Progress.begin(now_s, load.num_loaded),
        )
        sequence.is_loading = True
        return True

    def _awaits(self, sequence: Sequence, num_blocks: int, now_s: float) -> bool:
        """Let a sequence wait, once, until other ranks have saved its first blocks. Returns whether it waits."""
        sequence.num_awaited_tokens = 0
        pool, token_ids = self._pool, sequence.key_ids[: num_blocks * self._pool.block_tokens]
        is_cached = self._states is None and len(pool.match(token_ids, sequence.root_key)) == num_blocks
        key = pool.keys_of(token_ids, sequence.root_key)[-1]
        if is_cached or self._has_both(key):
            return False
        self._awaited[sequence] = _Awaited(key, now_s + MOST_AWAIT_S)
        sequence.is_loading = True
        return True

    def _has_both(self, key: bytes) -> bool:
        """Whether a tier has a block, and the state after it if the model keeps states."""
        has_state = self._states is None or self._tiers.has(key, is_state=True)
        return has_state and self._tiers.has(key)

    def _find(self, keys: list[bytes], num_matched: int) -> LoadJob | None:
        """Return what to load after the first `num_matched` blocks of a prefix. None if no tier can add to it."""
        states = self._states
        if states is None:
            end = num_matched
            while end < len(keys) and self._tiers.has(keys[end]):
                end += 1
            return LoadJob(keys[num_matched:end]) if end > num_matched else None
        first = states.find(keys[:num_matched]).num_blocks
        for end in range(len(keys), first, -1):
            if self._tiers.has(keys[end - 1], is_state=True):
                break
        else:
            return None
        missing = keys[num_matched:end]
        if not all(self._tiers.has(key) for key in missing):
            return None
        slot = states.take_left_over(self._slots_in_flight())
        return None if slot is None else LoadJob(missing, state_key=keys[end - 1], slot=slot)

    def collect(self, now_s: float) -> None:
        """Take back the jobs that ended, and stop waiting for those that take too long."""
        while self._arrived:
            load = self._arrived.pop()
            load.until_s = min(load.until_s, now_s + MOST_AWAIT_S)
        for job in self._tiers.finished():
            if isinstance(job, SaveJob):
                self._num_saves[job.is_state] -= 1
                if not job.is_state:
                    self._pool.unpin(job.index)
                elif self._states is not None:
                    self._saved_states.discard(job.key)
                    self._states.give(job.index)
            elif isinstance(job, LoadJob):
                self._end_load(job, self._loads.pop(job), now_s)
            elif job in self._fetches:
                self._fetches.pop(job).sequence.is_loading = False
        for load, loading in list(self._loads.items()):
            if now_s > loading.progress.until_s and loading.sequence.is_loading:
                self._loads[load] = self._look_at_late(load, loading, now_s)
        for fetch, (sequence, until_s) in list(self._fetches.items()):
            if now_s > until_s or sequence.status is SequenceStatus.ENDED:
                fetch.is_unwanted, sequence.is_loading = True, False
                del self._fetches[fetch]
        for sequence, awaited in list(self._awaited.items()):
            if now_s > awaited.until_s or self._has_both(awaited.key):
                sequence.is_loading = False
                del self._awaited[sequence]
        self.tails.expire(now_s)

    def _look_at_late(self, load: LoadJob, loading: _Loading, now_s: float) -> _Loading:
        """Let a load that takes long go on, or stop it. If it has not stopped by the next look, its request waits no longer."""
        sequence = loading.sequence
        if load.should_stop:
            sequence.is_loading = False
            return loading
        num_left = len(load.keys) - load.num_loaded
        # Blocks without the state that belongs to them are of no use.
        num_computed = len(load.keys) if load.state_key is not None else num_left
        compute_s = num_computed * self._pool.block_tokens * self._tiers.prompt_token_s
        progress = loading.progress.after(load.num_loaded, num_left, compute_s, now_s)
        is_useful = loading.secret == self._tiers.secret and loading.root == sequence.root_key
        if progress is not None and is_useful and sequence.status is not SequenceStatus.ENDED:
            return loading._replace(progress=progress)
        self._tiers.stop(load)
        sequence.num_looked = sequence.num_admissions + 1  # it does not load the rest
        return loading._replace(progress=loading.progress._replace(until_s=now_s + _STOP_S))

    def _end_load(self, load: LoadJob, loading: _Loading, now_s: float) -> None:
        """Publish what was loaded, and release everything but a tail."""
        pool, states, size, sequence = self._pool, self._states, self._pool.block_tokens, loading.sequence
        request_id = sequence.request.request_id
        is_wanted = sequence.is_loading and sequence.status is SequenceStatus.WAITING
        if self._expected.get(request_id) is load:
            del self._expected[request_id]
            is_wanted = True
        is_valid = loading.secret == self._tiers.secret  # otherwise all prefixes were forgotten meanwhile
        kept, num_full = list(load.block_ids), len(load.block_ids)
        if loading.tail_end:
            num_full -= 1
            if is_valid and is_wanted and load.num_loaded > num_full:
                tail = Tail(kept.pop(), load.keys[-1], loading.tail_end, now_s + MOST_LOAD_S)
                self.tails.put(request_id, tail)
        num_loaded = min(load.num_loaded, num_full) if is_valid else 0
        parent = loading.matched[-1] if loading.matched else None
        for index in range(num_loaded):
            tokens = loading.token_ids[index * size : (index + 1) * size]
            pool.publish(load.block_ids[index], tokens, parent, loading.root)
            parent = load.block_ids[index]
        num_useful = num_loaded
        if states is not None and load.state_key is not None:
            if is_valid and load.has_state and num_loaded == len(load.block_ids):
                states.publish(load.slot, load.state_key)
            else:
                num_useful = 0
            states.give(load.slot)
        if sequence.is_loading and loading.num_admissions == 0:
            fetched = sequence.fetch.keys if sequence.fetch else ()
            sources = Counter(
                "peer" if key in fetched else source
                for key, source in zip(load.keys[:num_useful], load.sources, strict=False)
            )
            sequence.num_host_tokens = sources["host"] * size
            sequence.num_disk_tokens = sources["disk"] * size
            sequence.num_peer_tokens = sources["peer"] * size
            self._tiers.note(**{f"{source}_hit_tokens": count * size for source, count in sources.items()})
        sequence.is_loading = False
        pool.release([*loading.matched, *kept])

    def forget(self, generation: int) -> bytes:
        """Forget the records of older generations. Returns the secret of the keys from now on."""
        self._tiers.forget(generation)
        return self._tiers.secret
