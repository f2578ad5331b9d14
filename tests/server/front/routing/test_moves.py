"""Requests move to a rank with room. Each is answered once and completely under any fault."""

import random
from collections import Counter, deque
from typing import Any

import pytest

from kvcache.blocks import BlockPool
from scheduler.policy.request import (
    Expected,
    FinishReason,
    MemoryOrder,
    RankStats,
    Request,
    RequestOutput,
    SamplingParams,
    Withdraw,
)
from scheduler.policy.scheduler import Scheduler
from server.front.generations import Answer, Ask, Asker
from server.front.routing.loads import MoveCause
from server.front.routing.move_plans import MAX_MOVES, MOVE_GAIN_TOKENS
from server.front.routing.prefixes import PREFIX_CHUNK_TOKENS
from server.front.routing.router import Router
from server.front.routing.routers import FewestTokens
from server.link.messages import Abort, Expect
from server.options.pools import Role
from tests.support.engines.fake_tiers import FakeTiers
from tests.support.models.fake_model import VOCABULARY, PlannedRank, serve_alone
from tests.support.requests.desk import Desk, in_loop

SEATS, BLOCK_TOKENS = 2, 16


def stats_of(
    rank: int, *, running: int = 0, waiting: int = 0, free_blocks: int = 200, num_preemptions: int = 0
) -> RankStats:
    return RankStats(
        rank=rank,
        step=1,
        num_running=running,
        num_waiting=waiting,
        num_free_blocks=free_blocks,
        num_blocks=200,
        num_step_tokens=1,
        num_preemptions=num_preemptions,
        prefix_query_tokens=0,
        prefix_hit_tokens=0,
    )


def crowded(
    num_waiting: int, *, prompt_tokens: int = 300, priority: int = 0
) -> tuple[Router, dict[str, list[int]]]:
    """Return a router with two ranks, one with full seats and a queue and one empty, and the prompts."""
    router, prompts = Router(2), dict[str, list[int]]()
    for rank in (0, 1):
        router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS)
    for number in range(SEATS + num_waiting):
        name = f"r{number}"
        prompts[name] = [number] * prompt_tokens
        router.admit(name, 0, prompts[name], 256, priority=priority)
        if number < SEATS:
            router.begin(name)
    router.note_stats(stats_of(0, running=SEATS, waiting=num_waiting))
    router.note_stats(stats_of(1))
    return router, prompts


def test_as_many_as_find_a_seat_are_asked_for_the_first_ones_and_only_once() -> None:
    router, prompts = crowded(4)
    assert router.plan_moves(prompts.__getitem__) == {"r2": 0, "r3": 0}
    assert router.plan_moves(prompts.__getitem__) == {}, "their seats are reserved"
    router.begin("r2")
    assert router.plan_moves(prompts.__getitem__) == {"r4": 0}, "r2 stays and leaves its seat to another"


def test_the_most_urgent_goes_first() -> None:
    router, prompts = crowded(2)
    prompts["u"] = [9] * 300
    router.admit("u", 0, prompts["u"], 256, priority=-1)
    assert list(router.plan_moves(prompts.__getitem__)) == ["u", "r2"]


def test_nothing_moves_between_ranks_that_are_alike() -> None:
    router, prompts = crowded(0)
    assert router.plan_moves(prompts.__getitem__) == {}, "no request waits"
    router, prompts = crowded(2)
    router.note_stats(stats_of(1, running=SEATS, waiting=1))
    assert router.plan_moves(prompts.__getitem__) == {}, "requests wait there as well"
    router.note_stats(stats_of(1, running=SEATS))
    assert router.plan_moves(prompts.__getitem__) == {}, "no seat is free"
    router.note_stats(stats_of(1, free_blocks=300 // BLOCK_TOKENS))
    assert router.plan_moves(prompts.__getitem__) == {}, "the prompt does not fit"
    router.leave(1)
    router.note_stats(stats_of(1))
    assert router.plan_moves(prompts.__getitem__) == {}, "the rank is absent"


def test_a_small_gain_moves_nothing() -> None:
    router, prompts = crowded(1)
    for rank in (0, 1):
        router.note_size(rank, seats=SEATS * 100, block_tokens=BLOCK_TOKENS)  # it waits for blocks
    before_it = router.outstanding_tokens[0] - 300 - 256
    router.admit("there", 1, [7] * 10, 10)
    router.begin("there")
    while before_it - router.outstanding_tokens[1] >= MOVE_GAIN_TOKENS:
        router.admit(str(router.outstanding_tokens), 1, [8] * 50, 0)
        router.begin(list(router._loads)[-1])
    assert router.plan_moves(prompts.__getitem__) == {}


def test_a_prefix_that_is_held_where_it_waits_keeps_a_request_and_one_held_elsewhere_draws_it() -> None:
    shared = list(range(48 * PREFIX_CHUNK_TOKENS))

    def planned(holder: int) -> dict[str, int]:
        router, prompts = crowded(0)
        router.admit("before", holder, shared, 1)
        router.retire("before")
        prompts["w"] = [*shared, 5]
        router.admit("w", 0, prompts["w"], 10)
        router.note_stats(stats_of(0, running=SEATS, waiting=1))
        return router.plan_moves(prompts.__getitem__)

    assert planned(holder=0) == {} and planned(holder=1) == {"w": 0}


def test_what_waits_behind_a_request_is_not_before_it() -> None:
    shared = list(range(48 * PREFIX_CHUNK_TOKENS))
    router, prompts = crowded(0, prompt_tokens=10)
    router.admit("before", 0, shared, 1)
    router.retire("before")
    for name, prompt in (("w", [*shared, 5]), *((f"behind{number}", [number] * 400) for number in range(10))):
        prompts[name] = prompt
        router.admit(name, 0, prompt, 10)
    router.note_stats(stats_of(0, running=SEATS, waiting=11))
    assert "w" not in router.plan_moves(prompts.__getitem__)


def test_a_key_s_flood_leaves_another_key_a_place_elsewhere_too() -> None:
    router, prompts = crowded(6)
    prompts["other"] = [99] * 300
    router.admit("other", 0, prompts["other"], 256, key_id="other")
    assert router.plan_moves(prompts.__getitem__) == {"r2": 0, "other": 0}


def test_the_router_of_fewest_tokens_knows_no_prefixes_in_moves_either() -> None:
    router, shared = FewestTokens(2), list(range(48 * PREFIX_CHUNK_TOKENS))
    router.admit("before", 0, shared, 1)
    router.retire("before")
    router.admit("running", 0, [1] * 900, 10)
    router.begin("running")
    router.admit("w", 0, shared, 10)
    for rank in (0, 1):
        router.note_size(rank, seats=1, block_tokens=BLOCK_TOKENS)
    router.note_stats(stats_of(0, running=1, waiting=1))
    router.note_stats(stats_of(1))
    assert router.plan_moves({"w": shared}.__getitem__) == {"w": 0}


def test_what_was_given_back_leaves_no_prefix_behind() -> None:
    router, prompts = crowded(1)
    router.take_back("r2", prompts["r2"])
    assert router.pick(prompts["r2"]) == 1
    router.admit("r2", 1, prompts["r2"], 256, num_moves=MAX_MOVES)
    for name in ("r0", "r1", "r2"):
        router.retire(name)
    assert router.pick([*prompts["r2"], 1]) == 1, "the prompt was computed on rank 1 only"


def test_a_prefix_that_another_request_brought_meanwhile_stays() -> None:
    router, prompts = crowded(1)
    router.admit("same", 0, prompts["r2"], 1)
    router.take_back("r2", prompts["r2"])
    assert router._prefixes.held_tokens(prompts["r2"]) == {0: 4 * PREFIX_CHUNK_TOKENS}
    router.take_back("same", prompts["r2"])
    assert router._prefixes.held_tokens(prompts["r2"]) == {}


def test_what_is_given_back_goes_where_its_place_is_kept_unless_others_wait_there_now() -> None:
    def given_back(*, waiting: int = 0, is_lost: bool = False) -> int | None:
        router, prompts = crowded(1)
        assert router.plan_moves(prompts.__getitem__) == {"r2": 0}
        router.note_stats(stats_of(1, running=SEATS, waiting=waiting))
        if is_lost:
            router.leave(1)
        return router.take_back("r2", prompts["r2"]).target

    assert given_back() == 1
    assert given_back(waiting=1) is None and given_back(is_lost=True) is None


def test_a_request_moves_a_bounded_number_of_times() -> None:
    router, prompts = crowded(1)
    router.take_back("r2", prompts["r2"])
    router.admit("r2", 0, prompts["r2"], 256, num_moves=MAX_MOVES)
    assert router.plan_moves(prompts.__getitem__) == {}


class CrowdedDesk(Desk):
    """One rank runs two requests of a session and queues the others. The other rank is idle."""

    def __init__(self, names: str = "abcd", *, num_ranks: int = 2) -> None:
        super().__init__(num_ranks=num_ranks)
        self.requests._who_asks = lambda: Asker(session="s")
        params = SamplingParams(max_tokens=256)
        self.answers = {
            name: self.requests.open(
                name,
                [
                    Ask(
                        request=Request(
                            request_id=name, prompt_ids=(ord(name),) * 400, params=params, arrival_s=0.0
                        )
                    )
                ],
            )
            for name in names
        }
        self.home = self.rank_of(names[0])
        self.other = (self.home + 1) % num_ranks
        assert {self.rank_of(name) for name in names} == {self.home}
        for rank in range(num_ranks):
            self.router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS)
        for name in names[:SEATS]:
            self.deliver(name)  # it has begun
        self.requests.note_stats(stats_of(self.other))
        self.look(num_waiting=len(names) - SEATS)

    def look(self, *, num_waiting: int) -> None:
        self.moves._looked_s = float("-inf")
        self.requests.note_stats(stats_of(self.home, running=SEATS, waiting=num_waiting))

    def give_back(self, name: str) -> None:
        output = RequestOutput(request_id=name, token_ids=[], is_returned=True)
        self.requests.deliver(self.home, [output])

    def end(self, names: str) -> None:
        for name in names:
            self.deliver(name, name, FinishReason.STOP)


async def text_of(answer: Answer) -> str:
    text = ""
    while pieces := await answer.next():
        text += "".join(piece.text for _, piece in pieces)
    return text


@in_loop
async def test_a_request_that_waits_goes_where_there_is_room_and_takes_its_session_along() -> None:
    desk = CrowdedDesk()
    assert desk.ranks.withdrawn == [(desk.home, "c"), (desk.home, "d")]
    desk.give_back("c")
    desk.deliver("d")  # it has begun meanwhile
    assert (desk.rank_of("c"), desk.rank_of("d")) == (desk.other, desk.home)
    assert desk.router.pick([1], "s") == desk.other
    desk.end("abcd")
    assert [await text_of(answer) for answer in desk.answers.values()] == list("abcd")
    assert desk.reasons() == [FinishReason.STOP] * 4 and desk.journal.num_moved.total() == 1


@in_loop
async def test_a_request_goes_to_the_rank_that_has_a_seat_and_not_to_one_with_fewer_tokens_and_none() -> None:
    desk = CrowdedDesk(num_ranks=3)
    full = 3 - desk.home - desk.other  # of small requests
    desk.requests.note_stats(stats_of(full, running=SEATS))
    desk.router.admit("there", desk.other, [1] * 300, 1)
    desk.router.begin("there")
    desk.requests.note_stats(stats_of(desk.other, running=1))
    assert desk.router.pick([2]) == full
    desk.look(num_waiting=2)
    desk.give_back("c")
    assert desk.rank_of("c") == desk.other
    desk.router.retire("there")
    desk.end("abcd")
    assert desk.reasons() == [FinishReason.STOP] * 4


@in_loop
async def test_a_deadline_amid_a_move_ends_the_request_once() -> None:
    desk = CrowdedDesk()
    desk.deliver("c", finish=FinishReason.DEADLINE)  # the rank had not read the withdrawal
    desk.give_back("d")
    desk.deliver(
        "d", finish=FinishReason.DEADLINE, rank=desk.home
    )  # ignored: this rank no longer has the request
    desk.deliver("d", finish=FinishReason.DEADLINE)
    desk.end("ab")
    assert len(desk.ranks.submitted) == 5
    assert desk.reasons() == [FinishReason.DEADLINE] * 2 + [FinishReason.STOP] * 2


class Hall:
    """Real schedulers over a fake model and fake tiers behind a front, with delayed messages. Nothing else is fake."""

    def __init__(self, rng: random.Random, num_ranks: int, *, has_roles: bool = False) -> None:
        """`has_roles`: ranks have roles, and tiers through which requests are handed over."""
        self.rng, self.desk = rng, Desk(num_ranks=num_ranks, prefill_threshold=4)
        self._host: FakeTiers | None = None  # has the records that ranks share
        self._has_roles, self._now_s = has_roles, 0.0
        self.desk.requests._who_asks = lambda: Asker(rng.choice("pq"), rng.choice(["", "s", "t"]))
        stub: Any = self.desk.ranks
        stub.submit, stub.post, stub.expect = self._submit, self._post, self._expect
        self.ranks: dict[int, PlannedRank] = {}
        self.to_rank: dict[int, deque[Request | Abort | Withdraw | Expected]] = {}
        self.num_ahead = 0  # blocks that were loaded while another rank ran the prompt
        self.to_front: dict[int, deque[tuple[list[RequestOutput], RankStats]]] = {}
        self.away: set[int] = set()
        self.most_parked = 0
        for rank in range(num_ranks):
            self._new_rank(rank)

    def _new_rank(self, rank: int) -> None:
        pool = BlockPool(12, 4)
        scheduler = Scheduler(pool, max_num_seqs=3, max_num_batched_tokens=8, max_model_len=40)
        self.ranks[rank] = PlannedRank(pool, scheduler, 8)
        self.to_rank[rank], self.to_front[rank] = deque(), deque()
        self.desk.router.note_size(rank, seats=3, block_tokens=4)
        if self._has_roles:
            self._host = FakeTiers(self.ranks[rank], self.rng.randrange(1000), shared=self._host)
            self.ranks[rank].tiers = self._host
            scheduler.use_tiers(self._host)
            self.change_role(rank)

    def change_role(self, rank: int) -> None:
        """Give a rank any role."""
        self.desk.router.set_role(rank, self.rng.choice([Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH]))

    def check_blocks(self) -> None:
        """Check that all ranks have released all blocks once their saves are done."""
        for fake in self.ranks.values():
            if fake.tiers is not None:
                fake.tiers.is_prompt = True
                fake.scheduler.collect(0.0)
            assert fake.pool.num_free == fake.pool.num_blocks, "blocks leaked"

    def _submit(self, rank: int, request: Request, *, now_s: float) -> None:
        assert rank not in self.away
        self.to_rank[rank].append(request)
        if self.rng.random() < 0.002:
            self.lose(rank)  # also while it gets what waited for it

    def _post(self, rank: int, message: Abort | Expect | Withdraw | MemoryOrder) -> None:
        assert not isinstance(message, MemoryOrder), "nothing sleeps here"
        if isinstance(message, Expect):
            if rank not in self.away:
                self.to_rank[rank].append(Expected(message.request_id, None))
            return
        assert rank not in self.away
        self.to_rank[rank].append(message)

    def _expect(self, rank: int, request: Request, *, now_s: float, in_step: bool = False) -> None:
        if rank not in self.away:  # the first rank may be lost at once, with others
            self.to_rank[rank].append(Expected(request.request_id, request, in_step))

    def step(self, rank: int) -> None:
        """Receive some messages, run a step, and send its outputs."""
        fake, outputs = self.ranks[rank], list[RequestOutput | None]()
        for _ in range(self.rng.randint(0, 3)):
            if self.to_rank[rank]:
                message = self.to_rank[rank].popleft()
                if isinstance(message, Request):
                    fake.outputs.pop(message.request_id, None)
                    fake.scheduler.add(message)
                elif isinstance(message, Expected):
                    fake.scheduler.expect(message, self._now_s)
                elif isinstance(message, Withdraw):
                    name, even_if_begun, _ = message
                    outputs.append(fake.scheduler.withdraw(name, even_if_begun=even_if_begun))
                else:
                    outputs.append(fake.scheduler.abort(message.request_id))
        said = {name: len(each) for name, each in fake.outputs.items()}
        fake.collect(fake.scheduler.expire(float("-inf")))
        self._now_s += 0.05
        if fake.tiers is not None:
            fake.tiers.now_s = self._now_s
            self.num_ahead += sum(load.num_loaded for load in fake.tiers._follows)
        batch = fake.plan(now_s=self._now_s)
        if batch.items:
            fake.finish()
        made = [one for name, each in fake.outputs.items() for one in each[said.get(name, 0) :]]
        stats = RankStats(rank=rank, step=0, num_step_tokens=0, **fake.scheduler.stats._asdict())
        self.to_front[rank].append(([*filter(None, outputs), *made], stats))

    def hear(self, rank: int) -> None:
        """Let the front receive one message of a rank."""
        if self.to_front[rank]:
            outputs, stats = self.to_front[rank].popleft()
            self.desk.moves._looked_s = float("-inf")
            self.desk.requests.note_stats(stats)
            self.desk.requests.deliver(rank, outputs)

    def lose(self, rank: int) -> None:
        """Lose a rank and the messages to it. Its own messages are in transit until it returns."""
        self.away.add(rank)
        self.desk.requests.leave([rank])
        self.most_parked = max(self.most_parked, self.desk.requests.num_parked)

    def enter(self, rank: int) -> None:
        """Bring a rank back, empty."""
        self.away.discard(rank)
        self._new_rank(rank)
        self.desk.requests.enter(rank)

    def release_memory(self) -> None:
        """Let the ranks that are idle lose what they have cached."""
        for rank, fake in self.ranks.items():
            if not (self.to_rank[rank] or fake.scheduler.holds_blocks):
                fake.scheduler.free_cached()
                fake.lose_memory()


@pytest.mark.parametrize("scale", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_moves_is_lost_and_left_every_request_gets_its_tokens_once(
    scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With twice as many days, all happens twice as often."""
    monkeypatch.setattr(
        "server.front.routing.move_plans.MOVE_GAIN_TOKENS", 1
    )  # prompts and answers are short here
    days = [run_a_day(seed, has_drains=seed % 2 == 0) for seed in range(3 * scale)]
    monkeypatch.setattr(
        "server.front.routing.move_plans.MOVE_GAIN_TOKENS", 1 << 40
    )  # so that queues grow while other ranks are idle
    days += [run_a_day(seed, has_drains=False, has_pauses=True) for seed in range(6 * scale)]
    days += [run_a_day(seed, has_drains=seed % 2 == 0, has_roles=True) for seed in range(3 * scale)]
    days += [run_a_day(seed, has_drains=seed % 2 == 0, has_sleeps=True) for seed in range(2 * scale)]
    journals = [hall.desk.journal for hall in days]
    num_moved = sum((journal.num_moved for journal in journals), Counter())
    assert all(num_moved[cause] > 7.5 * scale for cause in MoveCause), num_moved
    assert sum(journal.num_replayed for journal in journals) > 2.5 * scale
    assert sum(hall.most_parked > 0 for hall in days) > scale, "requests waited for any rank to return"
    assert sum(hall.num_ahead for hall in days) > 7.5 * scale, "blocks were loaded before their requests came"


def run_a_day(
    seed: int,
    *,
    has_drains: bool,
    has_pauses: bool = False,
    has_roles: bool = False,
    has_sleeps: bool = False,
) -> Hall:
    """Let requests arrive, move, lose their ranks and be left until none is open. Each must get the answer it would get alone.
    At the end no rank has work.

    `has_drains`: ranks drain. `has_pauses`: requests come in groups, after which ranks become idle. `has_roles`: ranks have
    roles that change. `has_sleeps`: the service sleeps and keeps its requests.
    """
    halls: list[Hall] = []

    @in_loop
    async def run() -> None:
        rng = random.Random(seed)
        hall = Hall(rng, num_ranks=3, has_roles=has_roles)
        halls.append(hall)
        answers: dict[str, tuple[Request, Answer]] = {}
        left: set[str] = set()
        for time in range(4000):
            rate = (0.8 if time % 100 < 20 else 0.0) if has_pauses else 0.2
            requests = hall.desk.requests
            if has_sleeps and time < 500 and rng.random() < 0.01:
                requests.pause()
            if hall.desk.router.is_paused and not requests.num_at_ranks:
                hall.release_memory()
                requests.resume()
            if time < 500 and rng.random() < rate and len(hall.away) < 3 and not hall.desk.router.is_paused:
                name = f"r{len(answers)}"
                prompt = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 24)))
                params = SamplingParams(max_tokens=rng.randint(1, 14))
                request = Request(request_id=name, prompt_ids=prompt, params=params, arrival_s=0.0)
                answers[name] = request, hall.desk.requests.open(name, [Ask(request=request)])
            if answers and rng.random() < (0.1 if len(hall.away) == 3 else 0.01):
                name = rng.choice(list(answers)[-12:])
                if not answers[name][1].generations[0].finished:
                    answers[name][1].close()
                    left.add(name)
            rank = rng.randrange(3)
            if rank in hall.away:
                hall.hear(rank)
                if rng.random() < 0.03 or time >= 500:
                    hall.enter(rank)
                continue
            rng.choice([hall.step, hall.hear])(rank)
            if rng.random() < 0.004 and time < 500:
                for lost in rng.choice([{rank}, {0, 1, 2} - hall.away]):
                    hall.lose(lost)
                continue
            if has_roles and rng.random() < 0.01:
                hall.change_role(rank)
            if has_drains and rng.random() < 0.01 and hall.desk.router.can_spare(rank):
                hall.desk.moves.drain(rank)
            if has_drains and rng.random() < 0.02:
                hall.desk.moves.undo(rank)
            if time > 500 and not hall.desk.requests.num_open:
                break
        assert len(hall.desk.reasons()) == len(answers), "one outcome each"
        for name, (request, answer) in answers.items():
            expected, _ = serve_alone(request, 40)
            got = answer.generations[0].take().token_ids
            assert got == (expected[: len(got)] if name in left else expected), name
        for rank, fake in hall.ranks.items():
            while hall.to_rank[rank] or fake.scheduler.has_work:  # aborts are still on their way
                hall.step(rank)
            stats = fake.scheduler.stats
            assert stats.num_running + stats.num_waiting == 0, "a rank serves a request that has ended"
        hall.check_blocks()

    run()
    return halls[0]
