"""Nodes meet in any order. One sentence names nodes that are missing, refused, unreachable or gone."""

import concurrent.futures
import itertools
import socket
import threading
from collections.abc import Callable

import pytest

from dispatch.ports import free_port
from server.serve.store import meeting as subject
from server.serve.store.meeting import Endpoint, Meeting, MeetingError, meet

TIMEOUT_S = 30.0


def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1", free_port())


def quiet(_text: str) -> None:
    """Print nothing."""


def one_sentence(call: Callable[[], object]) -> str:
    with pytest.raises(MeetingError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("order", list(itertools.permutations("abc"))[:4])
def test_all_get_what_all_gave_whatever_the_order_of_start(order: tuple[str, ...]) -> None:
    place, has_begun = endpoint(), {name: threading.Event() for name in order}

    def node(at: int) -> tuple[int, list[str], list[str], list[int]]:
        if at:
            has_begun[order[at - 1]].wait(TIMEOUT_S)
        has_begun[order[at]].set()
        with meet(place, 3, order[at], timeout_s=TIMEOUT_S, say=quiet) as met:
            names = met.gather("names", order[at], TIMEOUT_S)
            return met.number, met.names, names, met.gather("squares", met.number**2, TIMEOUT_S)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        found = list(threads.map(node, range(3)))
    assert sorted(number for number, *_ in found) == [0, 1, 2]
    for number, names, gathered, squares in found:
        assert sorted(names) == ["a", "b", "c"] and gathered == names and squares == [0, 1, 4]
        assert names[number] == order[[each[0] for each in found].index(number)]


def test_a_missing_node_is_told_while_waiting_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "SAY_AFTER_S", 0.05)
    said: list[str] = []
    text = one_sentence(lambda: meet(endpoint(), 3, "a", timeout_s=0.5, say=said.append))
    assert said == ["waiting for 2 of 3 nodes (joined: a); run the same command there"]
    assert text.startswith("2 of 3 nodes (joined: a) did not join within 0.5 s; run the same command there")


def test_a_doctor_with_another_number_of_nodes_is_refused_and_both_sides_say_so() -> None:
    place, said, was_refused = endpoint(), list[str](), threading.Event()

    def hear(text: str) -> None:
        if "was refused" in text:  # other lines name the missing nodes
            said.append(text)
            was_refused.set()

    assert subject._listen(place, 2), "the endpoint's node is there first"
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, place, 2, "a", timeout_s=TIMEOUT_S, say=hear)
        refused = one_sentence(lambda: meet(place, 3, "b", timeout_s=TIMEOUT_S, say=quiet))
        assert refused.startswith("this node was refused: --nnodes is ")
        assert was_refused.wait(TIMEOUT_S)
        with meet(place, 2, "c", timeout_s=TIMEOUT_S, say=quiet), first.result(TIMEOUT_S) as met:
            assert met.names == ["a", "c"]
    assert said[0].startswith("b was refused: --nnodes is 3, but 2 on the endpoint's node")


def test_an_endpoint_that_nobody_knows_is_one_sentence() -> None:
    place = Endpoint.parse("no-such-host.invalid:29400")
    text = one_sentence(lambda: meet(place, 2, "a", timeout_s=TIMEOUT_S, say=quiet))
    assert text.startswith(
        "--rdzv-endpoint is no-such-host.invalid:29400, but this node cannot resolve the host ("
    )


@pytest.mark.parametrize("text", ["head", "head:", ":29400", "head:0", "head:x", "head:\u00b2", "head:65536"])
def test_what_is_no_endpoint_is_one_sentence(text: str) -> None:
    assert one_sentence(lambda: Endpoint.parse(text)).startswith(
        f"--rdzv-endpoint is {text!r}; it must be HOST:PORT"
    )


def test_a_port_that_another_program_has_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = Endpoint("127.0.0.1", other.getsockname()[1])
        text = one_sentence(lambda: meet(place, 2, "a", timeout_s=TIMEOUT_S, say=quiet))
    assert text.startswith(f"another program uses {place} (perhaps a running service); stop it, or choose")


def test_a_node_that_leaves_is_named_to_the_others() -> None:
    place = endpoint()

    def leave() -> None:
        with meet(place, 2, "b", timeout_s=TIMEOUT_S, say=quiet):
            pass

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first: concurrent.futures.Future[Meeting] = threads.submit(
            meet, place, 2, "a", timeout_s=TIMEOUT_S, say=quiet
        )
        # b leaves, whether it listens or a does.
        leaving = threads.submit(leave)
        with first.result(TIMEOUT_S) as met:
            text = one_sentence(lambda: met.gather("stage", 1, TIMEOUT_S))
        leaving.result(TIMEOUT_S)
    assert text == "b exited early; see its doctor's output"


@pytest.mark.slow  # waits for the silent stranger
def test_a_stranger_at_the_endpoint_disturbs_nobody() -> None:
    place = endpoint()
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        first = threads.submit(meet, place, 2, "a", timeout_s=TIMEOUT_S, say=quiet)
        for content in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[]\n",
            b'{"doctor": 1}\n',
            b'{"stage": "x", "value": 1}\n',
            b"",
        ):
            with subject.connect(place, float("inf"), quiet) as stranger:
                stranger.sendall(content)
        with meet(place, 2, "b", timeout_s=TIMEOUT_S, say=quiet), first.result(TIMEOUT_S) as met:
            assert met.names == ["a", "b"]
