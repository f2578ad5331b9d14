"""Batches over HTTP with OpenAI's client: run, failed, cancelled, resumed after a kill of the front, and private to each key."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, word: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    """Return a request line."""
    asked = {"messages": [{"role": "user", "content": word}]} if url == CHAT else {"prompt": word}
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": "tiny", "max_tokens": 8, **asked, **body},
    }


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def begin(client: openai.OpenAI, content: bytes, endpoint: Any = COMPLETIONS, **fields: Any) -> Batch:
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def wait_for(client: openai.OpenAI, batch_id: str, *statuses: str) -> Batch:
    seen = client.batches.retrieve(batch_id)

    def is_there() -> bool:
        nonlocal seen
        seen = client.batches.retrieve(batch_id)
        return seen.status in statuses

    wait_until(is_there, lambda: f"the batch is {seen}")
    return seen


def lines_of(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of an answer file by custom_id."""
    assert file_id is not None
    lines = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    found = {each["custom_id"]: each for each in lines}
    assert len(found) == len(lines), "each line is answered once"
    return found


def text_of(answer: dict[str, Any]) -> Any:
    return answer["response"]["body"]["choices"][0]["text"]


@pytest.fixture
def fronts() -> Iterator[list[FrontProcess]]:
    """Fronts that a test started, closed afterwards."""
    started: list[FrontProcess] = []
    yield started
    for process in started:
        process.close()


def client_of(front: FrontProcess, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url + "/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


def test_a_batch_answers_every_line_good_ones_and_others_apart(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("b-one", "the cat")
    front.script("b-two", "on the mat")
    content = jsonl(line("1", "b-one", CHAT), line("2", "b-two", CHAT), line("3", "x", CHAT, model="other"))
    batch = begin(client, content, CHAT, metadata={"night": "1"})
    assert (batch.object, batch.status, batch.completion_window) == ("batch", "validating", "24h")
    assert batch.expires_at == batch.created_at + 86_400 and batch.output_file_id is None
    ended = wait_for(client, batch.id, *ENDED)
    assert ended.status == "completed" and ended.errors is None and ended.metadata == {"night": "1"}
    assert ended.request_counts is not None
    assert ended.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    times = ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at
    assert None not in times and list(times) == sorted(map(int, times))  # type: ignore[arg-type]
    good = lines_of(client, ended.output_file_id)
    assert good["1"]["response"]["body"]["choices"][0]["message"]["content"] == "the cat"
    assert good["2"]["response"]["status_code"] == 200 and good["2"]["response"]["request_id"]
    assert good.keys() == {"1", "2"} and good["1"]["error"] is None
    [failed] = lines_of(client, ended.error_file_id).values()
    assert (
        failed["response"]["status_code"] == 404 and "other" in failed["response"]["body"]["error"]["message"]
    )
    told = client.files.retrieve(str(ended.output_file_id))
    assert (told.purpose, told.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_responses_of_lines_are_in_the_output_file_and_stored_only_on_request(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    front.script("b-line", "ok")
    lines = [
        {"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": {"input": "b-line", **given}}
        for custom_id, given in (("1", {}), ("2", {"store": True}))
    ]
    ended = wait_for(client, begin(client, jsonl(*lines), RESPONSES).id, *ENDED)
    answers = lines_of(client, ended.output_file_id)
    plain, stored = (answers[custom_id]["response"]["body"] for custom_id in ("1", "2"))
    assert (plain["status"], plain["store"], stored["store"]) == ("completed", False, True)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(plain["id"])
    assert client.responses.retrieve(stored["id"]).output_text == "ok"


@pytest.mark.parametrize(
    ("content", "code", "number", "words"),
    [
        (jsonl(line("1", "x")) + b"{\n", "invalid_json_line", 2, "line 2: not JSON"),
        (jsonl(line("1", "x"), line("1", "y")), "duplicate_custom_id", 2, "is already used by line 1"),
        (jsonl(line("1", "x"), line("2", "x", CHAT)), "mismatched_url", 2, "the batch's endpoint is '/v1/completions'"),
        (jsonl({**line("1", "x"), "url": "/v1/embeddings"}), "invalid_url", 1, "it must be one of"),
        (jsonl({**line("1", "x"), "method": "GET"}), "invalid_method", 1, "it must be 'POST'"),
        (jsonl(line("1", "x", stream=True)), "invalid_body_stream", 1, "leave it out"),
        (b"\n \n", "empty_file", None, "no requests"),
        (b"[" * 5000, "invalid_json_line", 1, "line 1: the line nests deeper than 100"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_fails_before_anything_runs(
    client: openai.OpenAI, content: bytes, code: str, number: int | None, words: str
) -> None:
    ended = wait_for(client, begin(client, content).id, *ENDED)
    assert ended.status == "failed" and ended.failed_at and ended.errors is not None and ended.errors.data
    first = ended.errors.data[0]
    assert (first.code, first.line) == (code, number) and words in str(first.message)
    assert ended.output_file_id is None and ended.error_file_id is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"endpoint": "/v1/embeddings"},
            "endpoint is '/v1/embeddings'; it must be one of /v1/chat/completions",
        ),
        ({"completion_window": "1h"}, "completion_window is '1h'; it must be '24h'"),
        ({"input_file_id": "../../etc/passwd"}, "No such File object: ../../etc/passwd"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 60}},
            "output_expires_after.seconds is '60'",
        ),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ],
)
def test_a_wrong_batch_is_refused_by_a_sentence(
    client: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    file = client.files.create(file=("a.jsonl", jsonl(line("1", "x"))), purpose="batch")
    asked = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
    with pytest.raises(openai.APIStatusError) as refused:
        client.batches.create(**asked)
    assert refused.value.status_code in (400, 404) and words in refused.value.message


def test_batches_are_paged_newest_first(client: openai.OpenAI) -> None:
    made = [begin(client, jsonl(line("1", "hello"))).id for _ in range(5)]
    for batch_id in made:
        wait_for(client, batch_id, *ENDED)
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == made[:2:-1] and page.has_more
    assert [each.id for each in client.batches.list(limit=2)][:5] == made[::-1], (
        "the client follows the pages"
    )
    last = client.batches.list(after=made[0], limit=100)
    assert not set(made) & {each.id for each in last.data}


def test_cancelling_keeps_what_was_answered_and_frees_the_ranks(
    front: FrontProcess, client: openai.OpenAI
) -> None:
    never = threading.Event()
    front.script("b-quick", "the cat")
    front.script("b-slow", "the mat", gates={1: never})
    batch = begin(client, jsonl(line("q", "b-quick"), *(line(str(n), "b-slow") for n in range(4))))
    wait_until(
        lambda: client.batches.retrieve(batch.id).request_counts.completed == 1, lambda: "nothing is answered"
    )
    file_id = batch.input_file_id
    with pytest.raises(openai.BadRequestError, match="is read by batch_"):
        client.files.delete(file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    ended = wait_for(client, batch.id, *ENDED)
    assert ended.status == "cancelled" and ended.cancelling_at and ended.cancelled_at
    assert list(lines_of(client, ended.output_file_id)) == ["q"] and ended.error_file_id is None
    wait_until(lambda: all(rank.num_open == 0 for rank in front.ranks), lambda: "ranks still run its lines")
    assert front.get("/load").json() == {"server_load": 0}
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status 'cancelled'"):
        client.batches.cancel(batch.id)
    assert client.files.delete(file_id).deleted


@pytest.mark.slow
def test_a_front_that_is_killed_loses_nothing_and_the_next_one_goes_on(
    model_dir: Path, tmp_path: Path, fronts: list[FrontProcess]
) -> None:
    flags = ("--served-model-name=tiny", f"--files-dir={tmp_path / 'kept'}")
    first = FrontProcess(model_dir, *flags).attach_all()
    fronts.append(first)
    first.script("b-done", "the cat")
    first.script("b-open", "the mat", gates={1: threading.Event()})
    lines = [line(f"d{n}", "b-done") for n in range(3)] + [line(f"o{n}", "b-open") for n in range(3)]
    with client_of(first) as client:
        batch = begin(client, jsonl(*lines))
        wait_until(
            lambda: client.batches.retrieve(batch.id).request_counts.completed == 3, lambda: "not answered"
        )
    first.process.kill()
    first.close()
    second = FrontProcess(model_dir, *flags)
    fronts.append(second)
    second.script("b-done", "another answer")
    second.script("b-open", "the mat")
    second.attach_all()
    with client_of(second) as client:
        ended = wait_for(client, batch.id, *ENDED)
        assert ended.status == "completed" and ended.request_counts.completed == 6
        answers = lines_of(client, ended.output_file_id)
        assert {key: text_of(each) for key, each in answers.items()} == {
            **{f"d{n}": "the cat" for n in range(3)},
            **{f"o{n}": "the mat" for n in range(3)},
        }
        asked = [second.decode(each.prompt_ids) for rank in second.ranks for each in rank.requests]
        assert not any("b-done" in each for each in asked), "what was finished is not run again"
        assert client.files.content(batch.input_file_id).content == jsonl(*lines)


def test_files_and_batches_are_those_of_their_key(front: FrontProcess, client: openai.OpenAI) -> None:
    batch = begin(client, jsonl(line("1", "hello")))
    ended = wait_for(client, batch.id, *ENDED)
    assert ended.status == "completed", "lines need no key"
    with client_of(front, "second") as other:
        for file_id in (batch.input_file_id, str(ended.output_file_id)):
            for ask in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError, match="No such File object"):
                    ask(file_id)
        for look in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="No batch found"):
                look(batch.id)
        with pytest.raises(openai.NotFoundError, match="No such File object"):
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )
        assert other.files.list().data == [] and other.batches.list().data == []
        assert {batch.input_file_id, ended.output_file_id} <= {each.id for each in client.files.list()}
        mine = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        theirs = other.files.create(file=("a.jsonl", b"{}"), purpose="batch")
        assert [each.id for each in other.files.list()] == [theirs.id]
        assert client.files.retrieve(mine.id).bytes == 2
    assert front.get("/v1/files", headers={}).status_code == 401


def test_a_file_comes_back_as_it_was_given_until_it_is_deleted(client: openai.OpenAI) -> None:
    content = b'{"a": "\xc3\xa9"}\r\n--boundary\r\n\r\nb\n\n'
    named = "../../etc/pass\u00e9 wd.jsonl"
    file = client.files.create(
        file=(named, content), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (file.object, file.purpose, file.bytes) == ("file", "batch", len(content))
    assert file.filename == "pass\u00e9 wd.jsonl" and file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    deleted = client.files.delete(file.id)
    assert (deleted.id, deleted.deleted) == (file.id, True)
    with pytest.raises(openai.NotFoundError, match=f"No such File object: {file.id}"):
        client.files.content(file.id)


def test_files_are_paged_in_either_order_also_while_they_are_deleted(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(5)]
    newest = client.files.list(limit=2, purpose="batch")
    assert [each.id for each in newest.data] == made[:2:-1] and newest.has_more
    oldest = client.files.list(order="asc", after=made[0], limit=2)
    assert [each.id for each in oldest.data] == made[1:3]
    assert client.files.list(purpose="vision").data == []
    seen = []
    for each in client.files.list(limit=2):
        client.files.delete(each.id)
        seen.append(each.id)
    assert seen[:5] == made[::-1] and client.files.list().data == []


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"data": {"purpose": "assistants"}, "files": {"file": b"{}"}}, "purpose is 'assistants'; it must be one of batch, vision, user_data"),
        ({"data": {"purpose": "batch"}, "files": {"file": b""}}, "file is missing or empty"),
        ({"data": {"purpose": "batch"}, "files": {"other": b"{}"}}, "file is missing or empty"),
        ({"json": {"purpose": "batch"}}, "Send the file as multipart/form-data"),
        ({"data": {"purpose": "batch", "expires_after[seconds]": "9"}, "files": {"file": b"{}"}}, "expires_after[seconds] is '9'"),
        ({"content": b"--x\r\nno form", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "not a valid form"),
    ],
)  # fmt: skip
def test_what_is_no_upload_is_refused_by_a_sentence(
    front: FrontProcess, parts: dict[str, Any], words: str
) -> None:
    parts["headers"] = front.headers | parts.get("headers", {})
    answer = front.post("/v1/files", **parts)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/files?after=../x", "/v1/batches?limit=0", "/v1/files?limit=20000"])
def test_a_wrong_page_is_refused(front: FrontProcess, path: str) -> None:
    assert front.get(path).status_code == 400
