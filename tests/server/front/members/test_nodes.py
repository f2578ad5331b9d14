from server.front.members.nodes import RESERVED_S, Nodes
from server.link.messages import Claim, Claimed, PoolClaim
from server.options.pools import Pool, Role, single_pool


def two_nodes_of_two() -> Nodes:
    nodes = Nodes(single_pool(4))
    for rank in range(4):
        nodes.note(rank, f"node {rank // 2}", 0)
    return nodes


def test_a_newcomer_takes_the_place_of_a_node_that_is_away_as_a_whole() -> None:
    nodes = two_nodes_of_two()
    nodes.note(3, "node 1", 2)
    missing = {0: 5.0, 2: 7.0, 3: 9.0}
    given = [nodes.claim(Claim("new", local_rank, 2), missing, 10.0) for local_rank in (0, 1)]
    pool = single_pool(4)[0]
    assert given == [Claimed(2, 4, 1, pool=pool), Claimed(3, 4, 3, pool=pool)]


def test_of_several_nodes_the_one_that_is_away_longest_is_given() -> None:
    missing = {0: 5.0, 1: 8.0, 2: 7.0, 3: 6.0}
    assert two_nodes_of_two().claim(Claim("new", 0, 2), missing, 10.0).rank == 2


def test_a_place_is_given_to_one_newcomer_at_a_time() -> None:
    nodes, missing = two_nodes_of_two(), {2: 7.0, 3: 7.0}
    assert nodes.claim(Claim("new", 0, 2), missing, 10.0).rank == 2
    assert "no node is away" in nodes.claim(Claim("newer", 0, 2), missing, 10.0).refusal
    assert nodes.claim(Claim("newer", 0, 2), missing, 10.0 + RESERVED_S).rank == 2


def test_a_newcomer_of_another_size_is_told_the_size() -> None:
    answer = two_nodes_of_two().claim(Claim("new", 0, 1), {2: 7.0, 3: 7.0}, 10.0)
    assert "missing nodes had 2; give torchrun that --nproc-per-node" in answer.refusal
    assert not answer.may_come


def test_a_place_may_become_free_while_all_serve() -> None:
    answer = two_nodes_of_two().claim(Claim("new", 0, 2), {3: 7.0}, 10.0)
    assert answer.may_come
    assert answer.refusal == "no node is away, so a node with --nproc-per-node 2 cannot join"


def test_a_front_that_was_started_again_gives_the_ranks_that_it_has_never_seen() -> None:
    nodes = Nodes(single_pool(2))
    nodes.note(0, "node 0", 0)
    assert nodes.claim(Claim("new", 0, 1), {1: 7.0}, 10.0).rank == 1


PREFILL = Pool("prefill", Role.PREFILL, 0, 2)


def wants(
    node: str, local_rank: int = 0, *, of: int = 2, name: str = "decode", role: Role = Role.DECODE
) -> Claim:
    """Return the claim of a worker of a torchrun that brings a pool, all on one node."""
    return Claim(node, local_rank, of, PoolClaim(name, role, node, local_rank, of))


def with_decode() -> Nodes:
    """Return the nodes of a service to which a torchrun has added a pool."""
    nodes = Nodes([PREFILL])
    for local_rank in (0, 1):
        assert not nodes.claim(wants("first", local_rank), {}, 1.0).refusal
    assert nodes.admit(2) == Pool("decode", Role.DECODE, 2, 2) and nodes.admit(3) is None
    for rank in (2, 3):
        nodes.note(rank, "first", 1)
    return nodes


def test_a_pool_with_a_new_name_gets_the_next_ranks_and_belongs_to_the_service_once_a_rank_attaches() -> None:
    nodes = Nodes([PREFILL])
    given = [nodes.claim(wants("first", local_rank), {}, 1.0) for local_rank in (0, 1)]
    decode = Pool("decode", Role.DECODE, 2, 2)
    assert given == [Claimed(2, 4, 1, pool=decode), Claimed(3, 4, 1, pool=decode)]
    third = nodes.claim(wants("other", of=1, name="more"), {}, 1.0)
    assert third == Claimed(4, 5, 1, pool=Pool("more", Role.DECODE, 4, 1))
    assert [nodes.world_size_of(rank) for rank in range(6)] == [2, 2, 4, 4, 5, None]
    assert nodes.admit(0) is None
    assert nodes.admit(3) == decode and nodes.admit(2) is None
    assert [nodes.world_size_of(rank) for rank in range(6)] == [2, 2, 4, 4, 5, None]


def test_a_pool_that_never_attached_may_be_announced_again_in_another_form() -> None:
    nodes = Nodes([PREFILL])
    nodes.claim(wants("first"), {}, 1.0)
    refused = nodes.claim(wants("second", of=1, role=Role.BOTH), {}, 2.0)
    assert "another torchrun is joining as pool decode" in refused.refusal and refused.may_come
    given = nodes.claim(wants("second", of=1, role=Role.BOTH), {}, 1.0 + RESERVED_S)
    assert given == Claimed(2, 3, 1, pool=Pool("decode", Role.BOTH, 2, 1))
    assert nodes.world_size_of(3) is None, "the numbers of the earlier announcement are free again"


def test_a_pool_returns_into_its_place_only_while_it_is_away() -> None:
    nodes = with_decode()
    refused = nodes.claim(wants("again"), {0: 5.0, 1: 5.0}, 9.0)
    assert (
        "the service has a pool decode (decode, ranks 2 to 3), and no node of it is away" in refused.refusal
    )
    assert refused.may_come, "the front may not have noticed the end of the first one"
    given = [
        nodes.claim(wants("again", local_rank), {0: 5.0, 1: 5.0, 2: 7.0, 3: 7.0}, 9.0)
        for local_rank in (0, 1)
    ]
    assert [(each.rank, each.num_restarts) for each in given] == [(2, 2), (3, 2)]


def test_a_pool_that_was_lost_before_all_of_its_ranks_attached_may_return() -> None:
    nodes = Nodes([PREFILL])
    for local_rank in (0, 1):
        nodes.claim(wants("first", local_rank), {}, 1.0)
    nodes.admit(2)
    nodes.note(2, "first", 1)
    away = {2: 3.0, 3: 2.0}
    assert [nodes.claim(wants("again", local_rank), away, 4.0).rank for local_rank in (0, 1)] == [2, 3]
    rival = nodes.claim(wants("rival"), away, 5.0)
    assert rival.refusal and rival.may_come, "the place is reserved while its new ranks load"


def test_a_second_pool_of_a_name_with_another_role_or_size_is_refused_for_good() -> None:
    nodes, away = with_decode(), {2: 7.0, 3: 7.0}
    for claim, says in (
        (wants("again", role=Role.BOTH), "pool decode has the role decode, not both; give that --role"),
        (wants("again", of=3), "pool decode has 2 ranks, but this torchrun has 3; give it as many"),
        (wants("again", of=1), "a node with --nproc-per-node 1 cannot join: missing nodes had 2"),
    ):
        refused = nodes.claim(claim, away, 9.0)
        assert says in refused.refusal and not refused.may_come
    assert nodes.claim(wants("again"), away, 9.0).rank == 2, "nothing was reserved for them"


def test_a_torchrun_of_several_nodes_returns_as_the_whole_pool() -> None:
    def claim(run: str, rank: int) -> Claim:
        return Claim(f"{run}/{rank}", 0, 1, PoolClaim("decode", Role.DECODE, run, rank, 2))

    nodes = Nodes([PREFILL])
    assert [nodes.claim(claim("run", rank), {}, 1.0).rank for rank in (1, 0)] == [3, 2]
    nodes.admit(2)
    assert "no node of it is away" in nodes.claim(claim("next", 0), {2: 5.0}, 200.0).refusal
    away = {2: 205.0, 3: 205.0}
    assert nodes.claim(claim("next", 1), away, 210.0).rank == 3
    assert "no node of it is away" in nodes.claim(claim("rival", 0), away, 211.0).refusal
    assert nodes.claim(claim("next", 0), {2: 205.0}, 212.0).rank == 2, "its other rank has attached meanwhile"


def test_a_node_without_a_pool_takes_the_place_of_a_lost_node_of_any() -> None:
    given = with_decode().claim(Claim("new", 1, 2), {2: 7.0, 3: 7.0}, 9.0)
    assert given == Claimed(3, 4, 2, pool=Pool("decode", Role.DECODE, 2, 2))


def test_a_restarted_front_knows_the_pools_that_had_joined() -> None:
    nodes = Nodes([PREFILL])
    nodes.put(Pool("decode", Role.DECODE, 2, 2))
    assert nodes.world_size_of(3) == 4
    assert nodes.claim(wants("again"), {2: 7.0, 3: 7.0}, 9.0).rank == 2


def test_a_newcomer_takes_ranks_that_a_resize_adds() -> None:
    nodes, coming = two_nodes_of_two(), range(4, 7)
    given = [nodes.claim(Claim("new", local_rank, 2), {}, 10.0, coming) for local_rank in (0, 1)]
    pool = single_pool(7)[0]
    assert given == [Claimed(4, 7, 1, pool=pool), Claimed(5, 7, 1, pool=pool)]
    assert nodes.claim(Claim("newer", 0, 2), {}, 10.0, coming).may_come, "one is left for two"
    assert nodes.claim(Claim("newer", 0, 1), {}, 10.0, coming).rank == 6
    away = {2: 7.0, 3: 7.0}
    assert nodes.claim(Claim("last", 0, 2), away, 10.0, range(4, 8)).rank == 2, (
        "a place that is empty comes first"
    )
