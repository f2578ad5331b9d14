"""A batch's answers on disk: their format, and the recovery of torn or foreign files."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from server.api.openai.batches.bulk_client import Reply
from server.api.openai.batches.input_lines import BadLine, BatchFileError, BatchLine
from server.api.openai.batches.output_lines import BatchOutput, answer_entry, refusal_entry

LINE = BatchLine(key="batch_req_1", number=1, custom_id="a", url="/v1/completions", body={})
BAD = BadLine(
    key="batch_req_2", number=2, custom_id=None, reason="line 2: not JSON", code="invalid_json_line"
)


def good(key: str = "batch_req_1") -> dict[str, Any]:
    return answer_entry(LINE, Reply(200, "cmpl-1", {"id": "cmpl-1"})) | {"id": key}


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_and_refusals_have_openais_form(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        assert output.append(answer_entry(LINE, Reply(200, "cmpl-1", {"id": "cmpl-1"})))
        assert not output.append(refusal_entry(BAD))
    assert lines(path) == [
        {
            "id": "batch_req_1",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "cmpl-1", "body": {"id": "cmpl-1"}},
            "error": None,
        },
        {
            "id": "batch_req_2",
            "custom_id": None,
            "response": None,
            "error": {"code": "invalid_request", "message": "line 2: not JSON"},
        },
    ]


def test_a_later_run_knows_what_is_answered_and_what_failed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path) as output:
        output.append(good())
        output.append(answer_entry(LINE, Reply(400, "", {"error": {}})) | {"id": "batch_req_3"})
    with BatchOutput(path) as output:
        assert output.answered == {"batch_req_1": True, "batch_req_3": False}
        assert not output.was_torn
        output.append(good("batch_req_4"))
    assert [entry["id"] for entry in lines(path)] == ["batch_req_1", "batch_req_3", "batch_req_4"]


@pytest.mark.parametrize("torn", [b'{"id": "batch_req_9", "cus', b"{", b"\xff" * 200_000])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out"
    whole = json.dumps(good()).encode() + b"\n"
    path.write_bytes(whole + torn)
    with BatchOutput(path) as output:
        assert output.was_torn
        assert output.answered == {"batch_req_1": True}
    assert path.read_bytes() == whole


def test_a_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b'{"id": ')
    with BatchOutput(path) as output:
        assert (output.was_torn, output.answered) == (True, {})
    assert path.read_bytes() == b""


def test_a_whole_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text(json.dumps(good()))
    with BatchOutput(path) as output:
        assert not output.was_torn
        output.append(good("batch_req_4"))
    assert [entry["id"] for entry in lines(path)] == ["batch_req_1", "batch_req_4"]


@pytest.mark.parametrize("foreign", ['{"id": "vllm-1"}', "hello", '{"id": 3}', "[]"])
def test_a_file_with_anything_else_in_it_is_left_alone(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "out"
    path.write_text(json.dumps(good()) + "\n" + foreign + "\n")
    with pytest.raises(BatchFileError, match="out, line 2, is not an answer of run-batch; give another -o"):
        BatchOutput(path)
    assert path.read_text().endswith(foreign + "\n")


def test_two_batches_cannot_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with BatchOutput(path), pytest.raises(BatchFileError, match="is in use by another run-batch"):
        BatchOutput(path)
    BatchOutput(path).close()


def test_a_directory_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot write the answers to .*: No such file or directory"):
        BatchOutput(tmp_path / "none" / "out")


def test_a_full_disk_is_a_sentence_and_the_next_run_mends_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out"
    write = os.write

    def write_a_little(fd: int, content: bytes) -> int:
        if content.startswith(b"{"):
            return write(fd, content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    with BatchOutput(path) as output:
        output.append(good())
        with monkeypatch.context() as patched, pytest.raises(BatchFileError, match="No space left"):
            patched.setattr("server.api.openai.batches.output_lines.os.write", write_a_little)
            output.append(good("batch_req_4"))
    with BatchOutput(path) as output:
        assert output.was_torn
        assert output.answered == {"batch_req_1": True}
