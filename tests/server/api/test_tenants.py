"""Two API keys and an operator key on one front: B cannot see A's data or lose capacity to A. The attacks come from a review."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.http.guards import OPERATOR_PATHS
from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

SEATS = 16  # of the only rank
A, B, OPERATOR = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "key-o"))
# Endpoints for clients that do not affect the whole service. All paths below /v1 and /api are such, too.
CLIENT_POSTS = {"/invocations", "/tokenize", "/detokenize", "/generate", "/ping", "/is_scaling_elastic_ep"}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """A running front with small limits."""
    folder = tmp_path_factory.mktemp("front")
    (folder / "keys").write_text("key-a\nkey-b\n")
    (folder / "operators").write_text("key-o\n")
    flags = [f"--api-key-file={folder / 'keys'}", f"--operator-key-file={folder / 'operators'}"]
    flags += ["--served-model-name=m", "--max-files-bytes=100K"]
    model = write_tokenizer(folder)
    process = FrontProcess(model, *flags, num_ranks=1, max_num_seqs=SEATS, repeats=True).attach_all()
    yield process
    process.close()


@pytest.fixture
def client(front: FrontProcess) -> Iterator[httpx.Client]:
    """A client. Each request passes a key."""
    front.forget()
    with httpx.Client(base_url=front.url, timeout=TIMEOUT_S) as made:
        yield made
    assert front.ranks[0].wait_idle(TIMEOUT_S)


def hold(front: FrontProcess, word: str) -> threading.Event:
    """Hold prompts with `word` after their first token until the returned event is set."""
    goes_on = threading.Event()
    front.script(word, "abcdefgh", gates={1: goes_on})
    return goes_on


def respond(client: httpx.Client, key: dict[str, str], **body: Any) -> httpx.Response:
    body = {"model": "m", "input": "hello", "max_output_tokens": 1, **body}
    return client.post("/v1/responses", json=body, headers=key)


def test_a_response_is_there_for_the_key_that_made_it_alone(
    front: FrontProcess, client: httpx.Client
) -> None:
    made = respond(client, A, input="a secret of A", max_output_tokens=8).json()["id"]
    hold(front, "another")
    background = respond(client, A, background=True, input="another", max_output_tokens=8).json()["id"]
    for response_id in (made, background):
        path = f"/v1/responses/{response_id}"
        refused = [
            client.get(path, headers=B),
            client.get(path, params={"stream": True}, headers=B),
            client.delete(path, headers=B),
            client.post(f"{path}/cancel", headers=B),
            respond(client, B, previous_response_id=response_id, enable_response_messages=True),
            client.post(
                "/v1/responses/input_tokens",
                json={"model": "m", "input": "x", "previous_response_id": response_id},
                headers=B,
            ),
            client.get(path, headers=OPERATOR),
        ]
        assert [each.status_code for each in refused] == [404] * len(refused)
        assert all("not found" in each.json()["error"]["message"] for each in refused)
        assert "secret" not in "".join(each.text for each in refused)
        assert client.get(path, headers=A).status_code == 200, "A's response still exists"
    goes_on = respond(client, A, previous_response_id=made, enable_response_messages=True)
    assert "a secret of A" in goes_on.text
    assert client.post(f"/v1/responses/{background}/cancel", headers=A).json()["status"] == "cancelled"
    assert client.delete(f"/v1/responses/{made}", headers=A).status_code == 200


@pytest.mark.slow
def test_many_responses_of_b_push_none_of_a_out(client: httpx.Client) -> None:
    kept = [respond(client, A).json()["id"] for _ in range(3)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: respond(client, B).json()["id"], range(1040)))
    assert [client.get(f"/v1/responses/{each}", headers=A).status_code for each in kept] == [200] * 3
    assert client.get(f"/v1/responses/{made[0]}", headers=B).status_code == 404, "B's own oldest is evicted"
    assert client.get(f"/v1/responses/{made[-1]}", headers=B).status_code == 200


def test_background_runs_of_a_leave_places_for_b(front: FrontProcess, client: httpx.Client) -> None:
    hold(front, "run")

    def begin(key: dict[str, str]) -> httpx.Response:
        return respond(client, key, background=True, input="run", max_output_tokens=8)

    begun = []
    while (last := begin(A)).status_code == 200:
        begun.append(last.json()["id"])
        assert len(begun) <= 128
    assert last.status_code == 429 and len(begun) == 128 and "128 of them yours" in last.text
    others = begin(B)
    assert others.status_code == 200
    for key, response_id in [(A, each) for each in begun] + [(B, others.json()["id"])]:
        assert client.delete(f"/v1/responses/{response_id}", headers=key).status_code == 200


def upload(client: httpx.Client, key: dict[str, str], content: bytes) -> httpx.Response:
    return client.post("/v1/files", files={"file": content}, data={"purpose": "batch"}, headers=key)


def test_files_of_a_leave_room_for_b(client: httpx.Client) -> None:
    mine = [upload(client, A, b"x" * 20_000) for _ in range(4)]
    assert [each.status_code for each in mine] == [200, 200, 413, 413]
    assert "40000 of them yours" in mine[-1].json()["error"]["message"]
    theirs = upload(client, B, b"x" * 20_000)
    assert theirs.status_code == 200
    for key, made in ((A, mine[0]), (A, mine[1]), (B, theirs)):
        assert client.delete(f"/v1/files/{made.json()['id']}", headers=key).status_code == 200


def test_lines_with_many_choices_leave_most_seats_to_others(
    front: FrontProcess, client: httpx.Client
) -> None:
    """40 lines with n=128 once took all seats until they ended, and a chat waited for one of 600 tokens."""
    hold(front, "many")
    body = {"model": "m", "prompt": "many", "n": 128, "max_tokens": 8}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(40)
    ]
    file = upload(client, A, b"".join(json.dumps(each).encode() + b"\n" for each in lines)).json()["id"]
    order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=order, headers=A).json()["id"]
    rank = front.ranks[0]
    try:
        wait_until(lambda: rank.num_open >= SEATS // 4, lambda: f"{rank.num_open} choices run")
        for _ in range(20):
            body = {"model": "m", "prompt": "chat", "max_tokens": 1}
            assert client.post("/v1/completions", json=body, headers=B).status_code == 200
            assert rank.num_open <= SEATS // 4
        assert len([each for each in rank.requests if "many" in front.decode(each.prompt_ids)]) == SEATS // 4
    finally:
        assert client.post(f"/v1/batches/{batch}/cancel", headers=A).status_code == 200
    wait_until(lambda: rank.num_open == 0, lambda: f"{rank.num_open} choices run")
    wait_until(
        lambda: client.get(f"/v1/batches/{batch}", headers=A).json()["status"] == "cancelled", lambda: batch
    )
    assert client.delete(f"/v1/files/{file}", headers=A).status_code == 200


def test_a_line_of_a_batch_keeps_its_responses_for_who_made_the_batch(client: httpx.Client) -> None:
    body = {"model": "m", "input": "hello", "max_output_tokens": 4, "store": True}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": body}
    file = upload(client, A, json.dumps(line).encode()).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/responses", "completion_window": "24h"}
    path = f"/v1/batches/{client.post('/v1/batches', json=batch, headers=A).json()['id']}"
    wait_until(lambda: client.get(path, headers=A).json()["status"] == "completed", lambda: path)
    output = client.get(path, headers=A).json()["output_file_id"]
    made = json.loads(client.get(f"/v1/files/{output}/content", headers=A).text)["response"]["body"]["id"]
    assert client.get(f"/v1/responses/{made}", headers=A).status_code == 200
    assert client.get(f"/v1/responses/{made}", headers=B).status_code == 404


def test_clients_that_leave_answers_with_new_keys_are_bounded(
    front: FrontProcess, client: httpx.Client
) -> None:
    """Each client disconnects at once. 32 requests may continue for the minute in which a client could reconnect."""
    rank, goes_on = front.ranks[0], hold(front, "left")
    body = {"model": "m", "prompt": "left", "max_tokens": 8, "stream": True}
    for number in range(48):
        headers = {**A, "Idempotency-Key": f"left-{number}"}
        with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            next(answer.iter_bytes())
    wait_until(lambda: len(rank.aborted) >= 16, lambda: f"{len(rank.aborted)} were ended")
    answered = client.post("/v1/completions", json={"model": "m", "prompt": "b", "max_tokens": 1}, headers=B)
    assert answered.status_code == 200 and rank.num_open == 32
    goes_on.set()


def test_every_endpoint_that_acts_on_the_whole_service_is_an_operator_s(client: httpx.Client) -> None:
    """Every new endpoint must be added to one of the two lists."""
    described = client.get("/openapi.json", headers=OPERATOR).json()["paths"]
    posts = {path for path, methods in described.items() if "post" in methods}
    acts = {path for path in posts if not path.startswith(("/v1/", "/api/"))} - CLIENT_POSTS
    assert acts >= {"/experts/plan", "/experts/apply", "/experts/rollback", "/flush_cache"}
    assert acts <= {*OPERATOR_PATHS} | {path for path in acts if path.startswith(("/experts/", "/pools"))}
    for path in (*acts, *OPERATOR_PATHS):
        method = "GET" if path == "/experts/record" else "POST"
        statuses = [client.request(method, path, headers=key).status_code for key in ({}, A, OPERATOR)]
        assert statuses[:2] == [401, 403] and statuses[2] not in (401, 403), path
    for key in (A, B, OPERATOR):
        assert respond(client, key).status_code == 200
