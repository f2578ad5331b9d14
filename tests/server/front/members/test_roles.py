"""Ranks with roles: which ranks a request gets, what moves, and that no load or place is left behind."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvcache.images import ImageRowsError
from scheduler.policy.request import FinishReason, Request, RequestOutput, SamplingParams
from server.front.routing.loads import EXPECTED_OUTPUT_TOKENS, MoveCause
from server.front.routing.router import Assignment, Router
from server.front.routing.routers import ROUTERS
from server.link.messages import RankFacts
from server.options.pools import Role
from tests.server.front.routing.test_moves import BLOCK_TOKENS, stats_of, text_of
from tests.support.requests.desk import Desk, in_loop

SEATS = 4
LONG = [1] * 640
SHORT = [2] * 20
P, D, B = Role.PREFILL, Role.DECODE, Role.BOTH


def router_of(*roles: Role, kind: str = "prefix") -> Router:
    """Return a router of idle ranks that have reported."""
    router = ROUTERS[kind](len(roles))
    for rank, role in enumerate(roles):
        router.set_role(rank, role)
        router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS)
        router.note_stats(stats_of(rank))
    return router


def admit(
    router: Router, name: str, prompt: Sequence[int], max_tokens: int = 256, session: str = ""
) -> Assignment:
    """Choose ranks for a request and admit it there."""
    places = router.assign(prompt, session, most_tokens=max_tokens)
    router.admit(name, places.rank, prompt, max_tokens, session, next_rank=places.next_rank)
    return places


@pytest.mark.parametrize(
    ("roles", "of_long", "of_short"),
    [
        ((P, D), (0, 1), (1, None)),
        ((D, P), (1, 0), (0, None)),
        ((P, B), (0, 1), (1, None)),
        ((B, D), (0, None), (0, None)),
        ((B, B), (0, None), (0, None)),
        ((P, P), (0, None), (0, None)),
        ((D, D), (0, None), (0, None)),
    ],
)
@pytest.mark.parametrize("kind", list(ROUTERS))
def test_each_part_of_a_request_goes_to_a_rank_with_its_role(
    roles: tuple[Role, Role], of_long: tuple[int, int | None], of_short: tuple[int, int | None], kind: str
) -> None:
    assert router_of(*roles, kind=kind).assign(LONG) == of_long
    assert router_of(*roles, kind=kind).assign(SHORT) == of_short


def test_prompts_and_answers_are_spread_separately() -> None:
    for kind in ROUTERS:
        router = router_of(P, P, D, D, kind=kind)
        places = [admit(router, str(number), [number] * 200) for number in range(8)]
        assert Counter(each.rank for each in places) == {0: 4, 1: 4}, kind
        assert Counter(each.next_rank for each in places) == {2: 4, 3: 4}, kind


def test_each_rank_is_charged_its_part() -> None:
    router = router_of(P, D)
    admit(router, "a", LONG, 100)
    assert router.outstanding_tokens == (640, 100)
    router.begin("a")
    router.progress("a", 1)
    assert router.outstanding_tokens == (0, 99)
    assert router.take_back("a", LONG, is_handed_over=True) == (MoveCause.HAND_OVER, 1)
    assert router.outstanding_tokens == (0, 0)


def test_a_conversation_whose_prefix_the_decoding_rank_holds_stays_there() -> None:
    router = router_of(P, D)
    router.admit("before", 1, LONG, 1)
    router.retire("before")
    assert router.assign([*LONG, *range(10, 10 + 63)]) == (1, None)
    assert router.assign([*LONG, *range(10, 10 + 64)]) == (0, 1)


def test_a_session_returns_to_the_rank_that_answered_it() -> None:
    router = router_of(P, P, D, D)
    first = admit(router, "a", LONG, session="s")
    assert first.next_rank is not None
    admit(router, "b", [7] * 300)
    for _ in range(3):
        assert router.assign([9] * 300, "s").next_rank == first.next_rank


def test_prompts_run_on_the_host_of_the_rank_that_decodes_unless_its_queue_is_longer_than_the_prompt() -> (
    None
):
    router = router_of(P, P, D, D)
    for rank in range(4):
        router.note_size(rank, seats=SEATS, block_tokens=BLOCK_TOKENS, host="ab"[rank % 2])
    router.admit("load", 2, [5] * 90, 10)
    assert router.assign(LONG) == (1, 3)
    router.admit("queue", 1, [6] * (len(LONG) - 1), 0)
    assert router.assign(LONG) == (1, 3)
    router.admit("longer", 1, [6] * 2, 0)
    assert router.assign(LONG) == (0, 3)
    assert admit(router, "a", LONG) == (0, 3)
    router.leave(3)
    router.enter(3)
    router.note_stats(stats_of(3, running=SEATS))
    assert first_token(router, "a")[1] == 2, "it shares the host of the rank that ran the prompt"


def test_a_request_for_one_token_is_not_handed_over() -> None:
    router = router_of(P, D)
    assert router.assign(LONG, most_tokens=1) == (0, None)
    assert router.assign(LONG, most_tokens=2) == (0, 1)


def test_answers_go_where_room_is() -> None:
    router = router_of(P, D, D)
    router.note_stats(stats_of(1, running=SEATS))
    assert router.assign(LONG) == (0, 2)
    router.note_stats(stats_of(2, running=SEATS))
    assert router.assign(LONG).rank == 0, "a place is chosen again after the prompt"


def test_a_place_is_reserved_while_the_prompt_runs() -> None:
    router = router_of(P, D, D)
    router.note_stats(stats_of(1, running=SEATS - 1))
    router.note_stats(stats_of(2, running=SEATS - 1))
    places = []
    for name in "ab":
        places.append(admit(router, name, LONG))
        router.begin(name)
    assert {each.next_rank for each in places} == {1, 2}
    assert not router._with_room(np.array([False, True, True]), router._rooms(with_queues=True), 10).any()
    router.retire("a")
    assert router._with_room(np.array([False, True, True]), router._rooms(with_queues=True), 10).sum() == 1


def first_token(router: Router, name: str) -> tuple[MoveCause, int | None]:
    """Let a prefill rank release a request after its first token."""
    router.begin(name)
    router.progress(name, 1)
    return router.take_back(name, LONG, is_handed_over=True)


def test_the_rank_that_continues_is_another_one_if_the_first_is_full_or_gone_and_otherwise_the_same() -> None:
    def continued(*, full: Sequence[int] = (), lost: Sequence[int] = (), role: Role = D) -> int | None:
        router = router_of(P, D, D)
        router.admit("load", 2, [3] * 50, 10)
        assert admit(router, "a", LONG) == (0, 1)
        for rank in full:
            router.note_stats(stats_of(rank, free_blocks=10))
        for rank in lost:
            router.leave(rank)
        router.set_role(1, role)
        return first_token(router, "a")[1]

    assert continued() == 1
    assert continued(full=[1]) == 2
    assert continued(lost=[1]) == 2
    assert continued(role=P) == 2
    assert continued(full=[1, 2]) == 0, "it stays for now"
    assert continued(lost=[1, 2]) == 0
    assert continued(lost=[0, 1, 2]) is None


def test_a_request_that_stayed_moves_as_soon_as_a_rank_has_room_and_never_back() -> None:
    router = router_of(P, D)
    router.note_stats(stats_of(1, running=SEATS))
    router.admit("a", 0, [*LONG, 5], 255, is_resumed=True)
    router.begin("a")
    assert router.plan_hand_overs() == {}
    router.note_stats(stats_of(1, running=SEATS - 1))
    assert router.plan_hand_overs() == {"a": 0}
    assert router.plan_hand_overs() == {}, "it is on its way"
    assert router.take_back("a", LONG) == (MoveCause.HAND_OVER, 1)
    router.admit("a", 1, [*LONG, 5], 255, is_resumed=True)
    router.begin("a")
    router.note_stats(stats_of(1, running=1))
    assert router.plan_hand_overs() == {}


def test_what_will_be_handed_over_is_not_moved_before() -> None:
    router = router_of(P, D, B)
    admit(router, "a", LONG)
    router.begin("a")
    assert router.plan_hand_overs() == {}
    router.drain(0)
    assert router.plan_drains() == {}
    router.note_stats(stats_of(0, running=1, waiting=1, free_blocks=0))
    assert router.plan_relief({"a": LONG}.__getitem__) == {}


def test_a_waiting_prompt_moves_to_a_rank_that_runs_prompts() -> None:
    def moved(*roles: Role) -> dict[str, int]:
        router, prompts = router_of(*roles), {}
        for number in range(SEATS + 1):
            name = f"r{number}"
            prompts[name] = [number] * 900
            router.admit(name, 0, prompts[name], 256, next_rank=2 if roles[0] is P else None)
            if number < SEATS:
                router.begin(name)
        router.note_stats(stats_of(0, running=SEATS, waiting=1))
        moves = router.plan_moves(prompts.__getitem__)
        assert {router._loads[name].target for name in moves} <= {1, 2}
        return {name: router._loads[name].target or 0 for name in moves}

    assert moved(P, P, D) == {"r4": 1}
    assert moved(P, B, D) == {"r4": 1}
    assert moved(P, D, D) == {}
    assert moved(D, P, D) == {"r4": 2}
    assert moved(B, D, P) == {"r4": 2}


def test_a_rank_short_of_blocks_gives_its_requests_to_ranks_that_decode() -> None:
    def relieved(other: Role) -> dict[str, int]:
        router, prompts = router_of(D, other), {}
        for name in "ab":
            prompts[name] = [ord(name)] * 100
            router.admit(name, 0, prompts[name], 256)
            router.begin(name)
        router.note_stats(stats_of(0, running=2, free_blocks=1))
        return router.plan_relief(prompts.__getitem__)

    assert relieved(D) == relieved(B) == {"b": 0}
    assert relieved(P) == {}


def test_a_draining_rank_that_decodes_gives_its_requests_to_ranks_that_decode() -> None:
    router = router_of(D, P, D)
    router.admit("a", 0, [1] * 100, 256)
    router.begin("a")
    router.note_stats(stats_of(0, running=1))
    router.drain(0)
    assert router.plan_drains() == {"a": 0}
    assert router.take_back("a", [1] * 100) == (MoveCause.DRAIN, 2)


def test_a_changed_role_lets_running_requests_move_and_new_ones_stay_away() -> None:
    router = router_of(B, D)
    router.admit("a", 0, LONG, 256)
    router.begin("a")
    router.note_stats(stats_of(0, running=1))
    assert router.plan_hand_overs() == {}
    router.set_role(0, P)
    assert router.plan_hand_overs() == {"a": 0}
    assert router.assign([5] * 300) == (0, 1)
    router.set_role(1, P)
    assert router.plan_hand_overs() == {} and router.assign([5] * 300).next_rank is None


class RolesMachine(RuleBasedStateMachine):
    """Requests arrive, begin, get tokens, are handed over, move and end, while ranks are lost, drain and change roles."""

    @initialize(
        roles=st.lists(st.sampled_from(Role), min_size=2, max_size=4), kind=st.sampled_from(list(ROUTERS))
    )
    def start(self, roles: list[Role], kind: str) -> None:
        self.router = router_of(*roles, kind=kind)
        self.roles, self.num_ranks = roles, len(roles)
        self.prompts: dict[str, list[int]] = {}
        self.num_named = 0

    def _serving(self, *roles: Role) -> set[int]:
        """The ranks that may get requests and have one of these roles."""
        return {
            rank
            for rank in range(self.num_ranks)
            if self.router.is_receiver(rank) and self.roles[rank] in roles
        }

    def _admit(
        self, name: str, prompt: list[int], *, rank: int | None = None, is_resumed: bool = False
    ) -> None:
        router = self.router
        if not router.has_ranks:
            return
        places = Assignment(rank) if rank is not None and is_resumed else router.assign(prompt, rank=rank)
        prompts, decodes = self._serving(P, B), self._serving(D, B)
        assert router.is_receiver(places.rank)
        if places.next_rank is not None:
            assert places.rank in prompts and places.next_rank in decodes and places.rank != places.next_rank
            assert self.roles[places.rank] is P or self.roles[places.next_rank] is D
        elif rank is None and prompts and decodes:
            is_short = len(prompt) - router._prefixes.held_tokens(prompt).get(places.rank, 0) < 64
            assert places.rank in prompts & decodes or (places.rank in decodes and is_short)
        router.admit(name, places.rank, prompt, 100, next_rank=places.next_rank, is_resumed=is_resumed)
        self.prompts[name] = prompt

    @rule(length=st.integers(1, 400), family=st.integers(0, 2))
    def arrive(self, length: int, family: int) -> None:
        self.num_named += 1
        self._admit(f"r{self.num_named}", [family] * length)

    def _chosen(self, which: int) -> str:
        return list(self.prompts)[which % len(self.prompts)]

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99))
    def begin(self, which: int) -> None:
        self.router.begin(self._chosen(which))

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99), num_tokens=st.integers(1, 5))
    def deliver(self, which: int, num_tokens: int) -> None:
        """Deliver tokens. A request that hands over is released with its first one."""
        name = self._chosen(which)
        load = self.router._loads[name]
        hands_over = load.next_rank is not None
        self.router.begin(name)
        self.router.progress(name, 1 if hands_over else num_tokens)
        if hands_over:
            cause, target = self.router.take_back(name, self.prompts[name], is_handed_over=True)
            assert cause is MoveCause.HAND_OVER
            assert target is None or target in self._serving(D, B) | {load.rank}
            self._resume(name, target)

    def _resume(self, name: str, target: int | None) -> None:
        prompt = self.prompts.pop(name)
        self._admit(name, [*prompt, 3], rank=target, is_resumed=True)

    @precondition(lambda self: self.prompts)
    @rule(which=st.integers(0, 99))
    def end(self, which: int) -> None:
        name = self._chosen(which)
        self.router.retire(name)
        del self.prompts[name]

    @rule()
    def move(self) -> None:
        """Plan all moves, and let the ranks release every chosen request."""
        router, plans = self.router, dict[str, int]()
        for plan in (router.plan_drains, router.plan_hand_overs):
            plans |= plan()
        plans |= router.plan_moves(self.prompts.__getitem__)
        plans |= router.plan_relief(self.prompts.__getitem__)
        for name, rank in plans.items():
            load = router._loads[name]
            assert load.rank == rank and (load.next_rank is None or load.waits)
            decodes = self._serving(D, B)
            if not load.waits and load.target is not None and decodes:
                assert load.target in decodes, "running requests go to ranks that decode"
            was_running = not load.waits
            target = router.take_back(name, self.prompts[name]).target
            if was_running:
                self._resume(name, target)
            else:
                prompt = self.prompts.pop(name)
                self._admit(name, prompt, rank=target, is_resumed=load.is_resumed)

    @rule(
        rank=st.integers(0, 3),
        running=st.integers(0, SEATS),
        waiting=st.integers(0, 2),
        free=st.integers(0, 200),
    )
    def report(self, rank: int, running: int, waiting: int, free: int) -> None:
        if self.router.is_available(rank % self.num_ranks):
            self.router.note_stats(
                stats_of(rank % self.num_ranks, running=running, waiting=waiting, free_blocks=free)
            )

    @rule(rank=st.integers(0, 3), role=st.sampled_from(Role))
    def change_role(self, rank: int, role: Role) -> None:
        self.roles[rank % self.num_ranks] = role
        self.router.set_role(rank % self.num_ranks, role)

    @rule(rank=st.integers(0, 3), is_undone=st.booleans())
    def drain(self, rank: int, is_undone: bool) -> None:
        (self.router.undrain if is_undone else self.router.drain)(rank % self.num_ranks)

    @rule(rank=st.integers(0, 3))
    def lose(self, rank: int) -> None:
        """A rank is lost. Its requests go to the others; without any, they end here."""
        router, rank = self.router, rank % self.num_ranks
        router.leave(rank)
        for name in [name for name in self.prompts if router._loads[name].rank == rank]:
            router.retire(name)
            self._admit(name, self.prompts.pop(name), is_resumed=False)

    @rule(rank=st.integers(0, 3))
    def enter(self, rank: int) -> None:
        self.router.enter(rank % self.num_ranks)

    def teardown(self) -> None:
        if not hasattr(self, "router"):
            return
        router, loads = self.router, list(self.router._loads.values())
        assert router._loads.keys() == self.prompts.keys()
        outstanding, coming = [0] * self.num_ranks, [0] * self.num_ranks
        for load in loads:  # counted again
            last = load.rank if load.next_rank is None else load.next_rank
            outstanding[load.rank] += load.prompt_tokens
            outstanding[last] += load.output_tokens
            coming[last] += load.next_rank is not None
        assert router.outstanding_tokens == tuple(outstanding)
        assert router._num_coming.tolist() == coming
        for name in list(self.prompts):
            router.retire(name)
        assert not any(router.outstanding_tokens) and not router._num_coming.any()
        assert not any(router.num_open(rank) for rank in range(self.num_ranks))


RolesMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_any_history_respects_roles_and_leaves_no_load_behind = RolesMachine.TestCase


def role_desk(*roles: Role, hosts: str = "") -> Desk:
    """Return a desk with ranks that have roles and have reported."""
    desk = Desk(num_ranks=len(roles))
    for rank, role in enumerate(roles):
        desk.router.set_role(rank, role)
        desk.requests.note_rank(
            RankFacts(
                rank=rank, world_size=len(roles), host=hosts[rank] if hosts else "h", pid=1, max_model_len=4096,
                num_blocks=200, block_tokens=BLOCK_TOKENS, max_num_seqs=SEATS, max_num_batched_tokens=512,
                device="cpu",
            )
        )  # fmt: skip
        desk.requests.note_stats(stats_of(rank))
    return desk


PARAMS = SamplingParams(max_tokens=50)


def hand_over(desk: Desk, name: str, text: str = "a", *, saved: int = 0, rank: int | None = None) -> None:
    """Deliver the first token of a request, with which its rank releases it."""
    output = RequestOutput(
        request_id=name, token_ids=list(text.encode()), is_returned=True, num_saved_tokens=saved
    )
    desk.requests.deliver(desk.rank_of(name) if rank is None else rank, [output])


def long_desk(*roles: Role, hosts: str = "", names: str = "r") -> Desk:
    desk = role_desk(*roles, hosts=hosts)
    desk.open(*names, params=PARAMS, prompt_ids=tuple(LONG))
    return desk


@in_loop
async def test_a_request_is_handed_over_with_its_first_token() -> None:
    desk = role_desk(P, D)
    answer = desk.open("r", params=PARAMS, prompt_ids=tuple(LONG))
    (rank, request) = desk.ranks.submitted[-1]
    assert (rank, request.hands_over, request.num_awaited_tokens) == (0, True, 0)
    hand_over(desk, "r", saved=640)
    (rank, request) = desk.ranks.submitted[-1]
    assert (rank, request.hands_over, request.num_awaited_tokens) == (1, False, 640)
    assert request.replayed_ids == tuple(b"a")
    desk.deliver("r", "b", num_cached_tokens=637)
    desk.deliver("r", "c", FinishReason.STOP)
    assert await text_of(answer) == "abc"
    assert desk.reasons() == [FinishReason.STOP]
    assert desk.journal.num_moved == {MoveCause.HAND_OVER: 1} and not desk.ranks.withdrawn
    text = (await desk.metrics.text()).decode()
    assert 'wideep:request_hand_over_seconds_count{engine="1",model_name="m"} 1.0' in text
    assert 'wideep:request_hand_over_computed_tokens_sum{engine="1",model_name="m"} 3.0' in text
    generation = answer.generations[0]
    assert generation.num_cached_tokens == 0, "the usage is that of the rank that ran the prompt"


@in_loop
async def test_the_rank_that_decodes_expects_a_request_until_it_comes_or_ends() -> None:
    desk = long_desk(P, D, names="xy")
    assert desk.ranks.expected == [(1, "x", True), (1, "y", True)]
    hand_over(desk, "x")
    desk.deliver("x", "b", FinishReason.STOP)
    assert len(desk.ranks.expected) == 2, "x has come"
    desk.requests.deliver(0, [RequestOutput(request_id="y", token_ids=[1], finish_reason=FinishReason.STOP)])
    assert desk.ranks.expected[2:] == [(1, "y", False)], "y has ended with its first token"


@in_loop
async def test_a_request_that_waits_for_a_rank_is_expected_no_more() -> None:
    desk = long_desk(P, D)
    desk.requests.pause()
    desk.deliver("r", is_returned=True)
    assert desk.requests.num_at_ranks == 0 and desk.ranks.expected == [(1, "r", True), (1, "r", False)]
    desk.requests.resume()
    assert desk.ranks.expected[2:] == [(1, "r", True)]


@in_loop
async def test_a_request_that_is_handed_over_elsewhere_is_expected_no_more() -> None:
    desk = long_desk(P, D, D)
    (expected_at, _, _) = desk.ranks.expected[0]
    desk.requests.leave([expected_at])
    hand_over(desk, "r")
    assert desk.rank_of("r") == 3 - expected_at
    assert desk.ranks.expected[-1] == (expected_at, "r", False)


@in_loop
async def test_a_request_whose_images_cannot_be_sent_fails_and_is_not_expected() -> None:
    desk = role_desk(P, D)

    def refuse(rank: int, request: Request, *, now_s: float) -> None:
        raise ImageRowsError("their rows are too large")

    desk.ranks.submit = refuse  # type: ignore[method-assign]
    answer = desk.open("r", params=PARAMS, prompt_ids=tuple(LONG))
    failure = answer.generations[0].failure
    assert failure is not None and (failure.status, "too large" in failure.message) == (500, True)
    assert desk.reasons() == [FinishReason.ERROR] and not desk.ranks.expected


@in_loop
async def test_a_rank_of_another_host_waits_for_no_blocks() -> None:
    desk = long_desk(P, D, hosts="ab")
    assert not desk.ranks.expected
    hand_over(desk, "r", saved=640)
    assert desk.ranks.submitted[-1][1].num_awaited_tokens == 0


@in_loop
async def test_a_stop_string_in_the_first_token_ends_the_request() -> None:
    desk = role_desk(P, D)
    answer = desk.open("r", params=PARAMS, prompt_ids=tuple(LONG), stops=("a",))
    hand_over(desk, "r")
    assert await text_of(answer) == "" and desk.reasons() == [FinishReason.STOP]
    assert len(desk.ranks.submitted) == 1


@in_loop
async def test_a_client_that_leaves_around_a_hand_over_frees_the_rank_that_has_the_request() -> None:
    desk = role_desk(P, D)
    before, after = (desk.open(name, params=PARAMS, prompt_ids=tuple(LONG)) for name in "xy")
    before.close()
    assert desk.ranks.aborted == [(0, "x")]
    hand_over(desk, "x", rank=0)  # sent before the abort arrived
    hand_over(desk, "y")
    after.close()
    assert desk.ranks.aborted == [(0, "x"), (1, "y")] and len(desk.ranks.submitted) == 3
    assert desk.reasons() == [FinishReason.ABORT] * 2


@in_loop
async def test_requests_of_lost_ranks_go_the_same_way_again() -> None:
    desk = long_desk(P, P, D, D)
    prefill, first = desk.rank_of("r"), desk.router._loads["r"].next_rank
    desk.requests.leave([prefill])
    assert desk.rank_of("r") == 1 - prefill and desk.ranks.submitted[-1][1].hands_over
    hand_over(desk, "r")
    decoding = desk.rank_of("r")
    assert decoding == first
    desk.deliver("r", "b")
    desk.requests.leave([decoding])
    (rank, request) = desk.ranks.submitted[-1]
    assert (rank, request.hands_over, request.replayed_ids) == (1 - prefill, True, tuple(b"ab"))
    hand_over(desk, "r", "c")
    assert desk.rank_of("r") == 5 - decoding
    desk.requests.leave([5 - decoding])
    (rank, request) = desk.ranks.submitted[-1]
    assert (rank, request.hands_over) == (1 - prefill, False), "no other rank is left"
    desk.deliver("r", "d", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP]


@in_loop
async def test_a_request_without_a_place_stays_and_moves_when_there_is_one() -> None:
    desk = long_desk(P, D)
    desk.requests.note_stats(stats_of(1, running=SEATS))
    hand_over(desk, "r")
    (rank, request) = desk.ranks.submitted[-1]
    assert (rank, request.hands_over) == (0, False) and not desk.journal.num_moved
    desk.deliver("r", "b")
    desk.moves.look(is_urgent=True)
    assert not desk.ranks.withdrawn
    desk.requests.note_stats(stats_of(1))
    desk.moves.look(is_urgent=True)
    assert desk.ranks.withdrawn == [(0, "r")] and desk.ranks.withdrawals[-1].even_if_begun
    desk.requests.deliver(0, [RequestOutput(request_id="r", token_ids=[], is_returned=True)])
    assert desk.rank_of("r") == 1 and desk.journal.num_moved == {MoveCause.HAND_OVER: 1}
    desk.deliver("r", "c", FinishReason.STOP)
    assert desk.reasons() == [FinishReason.STOP]


def test_the_expected_room_includes_tokens_to_come() -> None:
    router = router_of(P, D)
    need = -(-(len(LONG) + EXPECTED_OUTPUT_TOKENS) // BLOCK_TOKENS)
    for free_blocks, target in ((need, 0), (need + 1, 1)):
        router.note_stats(stats_of(1, free_blocks=free_blocks))
        assert admit(router, "a", LONG) == (0, 1)
        assert first_token(router, "a")[1] == target
