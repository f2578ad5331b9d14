from server.front.nodes import RESERVED_S, Nodes
from server.link.messages import Claim, Claimed


def two_nodes_of_two() -> Nodes:
    nodes = Nodes(4)
    for rank in range(4):
        nodes.note(rank, f"node {rank // 2}", 0)
    return nodes


def test_a_newcomer_takes_the_place_of_a_node_that_is_away_as_a_whole() -> None:
    nodes = two_nodes_of_two()
    nodes.note(3, "node 1", 2)
    missing = {0: 5.0, 2: 7.0, 3: 9.0}
    given = [nodes.claim(Claim("new", local_rank, 2), missing, 10.0) for local_rank in (0, 1)]
    assert given == [Claimed(2, 4, 1), Claimed(3, 4, 3)]


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
    nodes = Nodes(2)
    nodes.note(0, "node 0", 0)
    assert nodes.claim(Claim("new", 0, 1), {1: 7.0}, 10.0).rank == 1
