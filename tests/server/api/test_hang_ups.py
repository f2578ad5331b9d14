"""Clients that disconnect before their answer has ended free their places at the ranks at once, at every endpoint."""

import threading
from typing import Any

import httpx
import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "WORD"}]},
    "/v1/completions": {"prompt": "WORD"},
    "/v1/responses": {"input": "WORD"},
    "/v1/messages": {"messages": [{"role": "user", "content": "WORD"}], "max_tokens": 5},
}


def body_of(path: str, word: str, **how: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": word}]
    fields = {name: word if value == "WORD" else value for name, value in BODIES[path].items()}
    return fields | ({"messages": messages} if "messages" in fields else {}) | {"model": "tiny"} | how


def wait_for_abort(front: FrontProcess, word: str) -> None:
    front.served(word)
    for rank in front.ranks:
        ids = {each.request_id for each in rank.requests if word in front.decode(each.prompt_ids)}
        rank.wait_for(lambda told, ids=ids: ids <= set(told.aborted))  # type: ignore[misc]


@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_leaves_its_stream_frees_its_place(front: FrontProcess, path: str) -> None:
    word, never = f"hang-{path.rpartition('/')[2]}", threading.Event()
    front.script(word, "abc", gates={1: never})
    sent = httpx.stream(
        "POST",
        front.url + path,
        json=body_of(path, word, stream=True),
        headers=front.headers,
        timeout=TIMEOUT_S,
    )
    with sent as response:
        assert next(response.iter_lines())
    wait_for_abort(front, word)
    never.set()


@pytest.mark.crossed("path", every=2)
@pytest.mark.parametrize("path", BODIES)
def test_a_client_that_stops_waiting_for_a_whole_answer_frees_its_place(
    front: FrontProcess, path: str
) -> None:
    word, never = f"wait-{path.rpartition('/')[2]}", threading.Event()
    front.script(word, "abc", gates={0: never})
    choices = {"n": 2} if "completions" in path else {}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(front.url + path, json=body_of(path, word, **choices), headers=front.headers, timeout=0.3)
    wait_for_abort(front, word)
    never.set()
