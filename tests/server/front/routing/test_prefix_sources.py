"""Which rank a request's prefix may be fetched from: the one that had it, or the node that has seen clearly more of it."""

from kvcache.tiers.jobs import PeerAddress
from scheduler.policy.request import FinishReason, Request, RequestOutput, SamplingParams
from server.front.errors import ApiError
from server.front.generations import Ask
from server.front.routing.prefix_sources import LEAST_GAIN_TOKENS, PrefixSources
from server.link.messages import RankFacts
from tests.support.requests.desk import Desk, in_loop

MUCH = 4 * LEAST_GAIN_TOKENS


def peer(rank: int, node: str) -> PeerAddress:
    return PeerAddress(f"{node}:{rank}", node)


def sources_of(*nodes: str) -> PrefixSources:
    """Return the sources of ranks on these nodes, in order."""
    sources = PrefixSources()
    for rank, node in enumerate(nodes):
        sources.enter(rank, peer(rank, node))
    return sources


def test_the_node_that_has_seen_the_most_of_a_prefix_is_named_if_it_is_clearly_more() -> None:
    sources = sources_of("a", "a", "b", "c")
    assert sources.has_several
    assert sources.address_for(0, {2: MUCH, 3: MUCH // 2}) == "b:2"
    assert sources.address_for(0, {1: MUCH, 2: MUCH + LEAST_GAIN_TOKENS - 1}) == "", (
        "a rank of its node has nearly as much"
    )
    assert sources.address_for(0, {1: MUCH, 2: MUCH + LEAST_GAIN_TOKENS}) == "b:2"
    assert sources.address_for(2, {0: MUCH}) == sources.address_for(2, {1: MUCH}) == "a:0"
    assert sources.address_for(3, {0: MUCH}) == "a:1", "all ranks of a node serve the same memory"
    assert sources.address_for(0, {}) == ""


def test_the_rank_that_had_a_request_is_named_first_and_the_others_of_its_node_serve_for_a_lost_one() -> None:
    sources = sources_of("a", "b", "b", "c")
    assert sources.address_for(0, {3: MUCH}, previous=3) == "c:3"
    assert sources.address_for(0, {3: MUCH}, previous=1) == "b:1"
    sources.leave(1)
    assert sources.address_for(0, {3: MUCH}, previous=1) == "b:2"
    assert sources.address_for(2, {3: MUCH}, previous=1) == "", "it shares the memory of the lost rank"
    sources.leave(2)
    assert sources.address_for(0, {3: MUCH}, previous=1) == "c:3", "nothing of that node is left"
    assert sources.address_for(0, {}, previous=1) == ""
    sources.enter(1, peer(1, "d"))
    assert sources.address_for(0, {}, previous=1) == "d:1", "it has returned on another node"


def test_ranks_without_a_tier_in_host_memory_neither_fetch_nor_serve() -> None:
    sources = sources_of("a", "b")
    sources.enter(2, None)
    assert sources.address_for(2, {0: MUCH}, previous=1) == ""
    assert sources.address_for(0, {2: MUCH}, previous=2) == ""
    sources.enter(1, None)
    assert not sources.has_several and sources.address_for(0, {1: MUCH}) == ""
    assert not sources_of("a", "a").has_several and not PrefixSources().has_several


PROMPT = tuple(range(LEAST_GAIN_TOKENS + 64))


def desk_of(*nodes: str) -> Desk:
    desk = Desk(num_ranks=len(nodes))
    for rank, node in enumerate(nodes):
        facts = RankFacts(
            rank=rank, world_size=len(nodes), host=node, pid=1, max_model_len=900, num_blocks=99, block_tokens=16,
            max_num_seqs=4, max_num_batched_tokens=64, device="cpu", kv_peer=peer(rank, node),
        )  # fmt: skip
        desk.requests.note_rank(facts)
    return desk


def open_prompt(desk: Desk, name: str) -> None:
    params = SamplingParams(max_tokens=9)
    request = Request(request_id=name, prompt_ids=PROMPT, params=params, arrival_s=0.0)
    desk.requests.open(name, [Ask(request=request)])


@in_loop
async def test_a_request_names_the_node_of_its_prefix_or_of_its_last_rank() -> None:
    desk = desk_of("a", "b")
    open_prompt(desk, "first")
    assert desk.ranks.submitted[-1][1].prefix_at == ""
    desk.router.drain(0)
    open_prompt(desk, "second")
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.prefix_at) == (1, "a:0"), "the first one was computed there"
    desk.deliver("first", "x")
    desk.requests.deliver(0, [RequestOutput(request_id="first", token_ids=[], is_returned=True)])
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.request_id, request.prefix_at) == (1, "first", "a:0")
    desk.router.undrain(0)
    desk.requests.leave([1])
    assert [(rank, request.prefix_at) for rank, request in desk.ranks.submitted[-2:]] == [(0, ""), (0, "")], (
        "the whole node is lost, and the prompt was computed here"
    )
    desk.requests.fail_all(ApiError(503, "The test ends."))


@in_loop
async def test_a_rank_that_is_alive_when_its_requests_move_is_still_named() -> None:
    desk = desk_of("a", "b")
    desk.ranks.attached = {0}
    open_prompt(desk, "first")
    desk.requests.leave([0])
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.prefix_at) == (1, "a:0"), "its pool has not met again, but its host memory is there"
    desk.deliver("first", finish=FinishReason.ABORT, rank=0)
    desk.requests.enter(0)
    open_prompt(desk, "second")
    desk.router.drain(1)
    desk.deliver("first", "x")
    desk.deliver("first", is_returned=True)
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.prefix_at) == (0, "b:1")
    desk.deliver("first", "y")
    desk.router.undrain(1)
    desk.router.drain(0)
    desk.deliver("first", is_returned=True)
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.prefix_at) == (1, "a:0")
    desk.ranks.attached = set()
    desk.requests.note_lost(0)  # while its requests are elsewhere
    desk.router.drain(1)
    open_prompt(desk, "third")
    assert desk.rank_of("third") == 0
    desk.router.undrain(1)
    desk.router.drain(0)
    desk.deliver("third", "x")
    desk.deliver("third", is_returned=True)
    rank, request = desk.ranks.submitted[-1]
    assert (rank, request.prefix_at) == (1, ""), "the memory of its node is gone"
    desk.requests.fail_all(ApiError(503, "The test ends."))


@in_loop
async def test_a_rank_that_is_alive_when_its_requests_move_continues_to_drain_and_its_next_engine_does_not() -> (
    None
):
    desk = desk_of("a", "b")
    desk.ranks.attached = {0}
    desk.moves.drain(0)
    desk.requests.leave([0])
    assert [drain.rank for drain in desk.moves.drains()] == [0] and not desk.moves.takes_requests(0)
    desk.requests.enter(0)
    open_prompt(desk, "first")
    assert desk.rank_of("first") == 1
    desk.requests.leave([0])
    desk.ranks.attached = set()
    desk.requests.note_lost(0)
    assert not desk.moves.drains()
    desk.requests.fail_all(ApiError(503, "The test ends."))


@in_loop
async def test_ranks_of_one_node_name_no_address() -> None:
    desk = desk_of("a", "a")
    for name in ("first", "second"):
        open_prompt(desk, name)
    desk.requests.leave([0])
    assert {request.prefix_at for _, request in desk.ranks.submitted} == {""}
    desk.requests.fail_all(ApiError(503, "The test ends."))
