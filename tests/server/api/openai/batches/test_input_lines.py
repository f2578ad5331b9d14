"""The lines of a batch: good ones, and the reasons for refusing bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from server.api.openai.batches.input_lines import BadLine, BatchFileError, BatchLine, read_batch

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def read(tmp_path: Path, *lines: str | bytes | dict[str, Any]) -> list[BatchLine | BadLine]:
    """Write the lines and read them back."""
    path = tmp_path / "in.jsonl"
    raw = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in raw))
    return list(read_batch(path))


def reason(tmp_path: Path, line: str | bytes | dict[str, Any]) -> str:
    """Return the reason for refusing a line."""
    [bad] = read(tmp_path, line)
    assert isinstance(bad, BadLine)
    return bad.reason


def test_a_good_line_is_a_request(tmp_path: Path) -> None:
    [line] = read(tmp_path, GOOD)
    assert isinstance(line, BatchLine)
    assert (line.custom_id, line.url, line.body) == ("a", "/v1/completions", {"prompt": "x"})
    assert line.key.startswith("batch_req_")


@pytest.mark.parametrize(("given", "sent"), [({}, False), ({"store": None}, False), ({"store": True}, True)])
def test_the_response_to_a_line_is_stored_only_on_request(
    tmp_path: Path, given: dict[str, Any], sent: bool
) -> None:
    [line] = read(tmp_path, {**GOOD, "url": "/v1/responses", "body": {"input": "x", **given}})
    assert isinstance(line, BatchLine) and line.body == {"input": "x", "store": sent}


def test_blank_lines_a_byte_order_mark_and_carriage_returns_are_passed_over(tmp_path: Path) -> None:
    first, second = json.dumps(GOOD), json.dumps({**GOOD, "custom_id": "b"})
    lines = read(tmp_path, b"\xef\xbb\xbf" + first.encode() + b"\r", "", "  \r", second)
    assert [line.custom_id for line in lines] == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"custom_id": ', "line 1: not JSON (Expecting value at character 13)"),
        (b'{"custom_id": "\xff"}', "line 1: not UTF-8 (invalid start byte at byte 15)"),
        ("[1, 2]", "line 1: not a JSON object but [1, 2]"),
        ('{"custom_id": NaN}', "line 1: not readable as JSON (NaN is not JSON)"),
        ('{"custom_id": 1e999}', "line 1: not readable as JSON (1e999 is too large)"),
        ("[" * 100_000, "line 1: not readable as JSON (nested too deeply)"),
        ('{"a": ' + "9" * 5000 + "}", "line 1: not readable as JSON (Exceeds the limit"),
        ({**GOOD, "custom_id": None}, "custom_id is missing; it must be a non-empty, unique string"),
        ({**GOOD, "custom_id": 7}, "custom_id is 7;"),
        ({**GOOD, "method": "GET"}, "method is 'GET'; it must be 'POST'"),
        (
            {**GOOD, "url": "/v1/embeddings"},
            "url is '/v1/embeddings'; it must be one of /v1/chat/completions",
        ),
        ({**GOOD, "url": ["x"]}, "url is ['x'];"),
        ({**GOOD, "body": "x" * 500}, f"body is '{'x' * 59}...; it must be the request's JSON object"),
        ({**GOOD, "body": {"prompt": "x", "background": True}}, "body.background is true;"),
        ({**GOOD, "body": {"prompt": "x", "stream": True}}, "body.stream is true;"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(tmp_path: Path, line: Any, words: str) -> None:
    assert words in reason(tmp_path, line)


def test_a_custom_id_of_two_lines_is_the_first_ones(tmp_path: Path) -> None:
    first, second = read(tmp_path, GOOD, {**GOOD, "body": {"prompt": "y"}})
    assert isinstance(first, BatchLine)
    assert isinstance(second, BadLine)
    assert second.custom_id == "a"
    assert second.reason == "line 2: custom_id 'a' is already used by line 1"


def test_keys_follow_a_good_line_wherever_it_moves_and_a_bad_line_only_while_it_is_the_same(
    tmp_path: Path,
) -> None:
    key_of = {line.custom_id: line.key for line in read(tmp_path, GOOD, {**GOOD, "custom_id": "b"})}
    moved = read(tmp_path, {**GOOD, "custom_id": "b"}, "", GOOD)
    assert {line.custom_id: line.key for line in moved} == key_of
    first, again, changed = (read(tmp_path, text)[0].key for text in ("{", "{", "[]"))
    assert first == again != changed
    same_twice = read(tmp_path, "{", "{")
    assert same_twice[0].key != same_twice[1].key


def test_half_a_surrogate_pair_in_a_custom_id_is_no_accident(tmp_path: Path) -> None:
    [line] = read(tmp_path, GOOD | {"custom_id": "\ud800"})
    assert isinstance(line, BatchLine)


def test_a_file_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read the batch .*none: No such file or directory"):
        list(read_batch(tmp_path / "none"))
