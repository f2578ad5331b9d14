"""JSON in parts equals JSON at once and has the library's values, and no part is large."""

import json
from typing import Any

import numpy as np

from server.http.json_writer import (
    EncodedList,
    encode_json,
    is_larger,
    json_bytes,
    json_parts,
    long_json_bytes,
    num_chars_of,
)


def test_parts_joined_are_what_the_library_writes() -> None:
    matrix, row = np.arange(6).reshape(2, 3), np.array([0.5, 2.0])
    value: dict[str, Any] = {
        "empty": {}, "none": None, "text": 'a "b" ü\u2028\ud800', "list": [1, [], {}], "pairs": [{"row": row}, {"row": row}],
        "matrix": matrix, "nothing": np.zeros((0, 4)), "flags": (True, False), "number": 1.25,
    }  # fmt: skip
    plain = {
        **value, "matrix": matrix.tolist(), "nothing": [], "flags": [True, False],
        "pairs": [{"row": row.tolist()}] * 2,
    }  # fmt: skip
    assert long_json_bytes(value) == json_bytes(plain)
    assert json.loads(json_bytes(plain)) == json.loads(json.dumps(plain))
    many = [{"number": number, "within": [[number]]} for number in range(3000)]
    encoded = EncodedList([encode_json(each) for each in many])
    assert long_json_bytes({"a": many}) == long_json_bytes({"a": encoded}) == json_bytes({"a": many})
    assert json_bytes({"a": encoded, "b": "\u2028ü"}) == json_bytes({"a": many, "b": "\u2028ü"})
    assert long_json_bytes([EncodedList([]), {}]) == b"[[],{}]"
    ids = list(range(10_000))
    assert long_json_bytes({"ids": ids}) == json_bytes({"ids": ids})
    assert max(map(len, json_parts(ids))) < 30_000


def test_the_size_of_a_value_counts_its_text_and_its_values() -> None:
    text = {"a": "x" * 1000, "b": [("y" * 500, None)]}
    assert 1500 < num_chars_of(text) < 1700
    assert num_chars_of(EncodedList(["[1,2]"] * 1000)) > 5000
    assert is_larger(text, 1500) and not is_larger(text, 2000)
    assert num_chars_of([text] * 1000, 10_000) < 20_000, "counting stops"


def test_no_part_is_longer_than_a_row() -> None:
    parts = list(json_parts({"a": np.full((100, 50), 1234567), "b": [{"c": np.zeros(50)}] * 30}))
    assert max(map(len, parts)) <= 50 * len("1234567, ")
