"""JSON of bodies: its shape is that of the parsed value, and parsing in pieces equals parsing at once."""

import gc
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.front.errors import ApiError
from server.http import json_text
from server.http.json_text import MAX_JSON_DEPTH, json_shape, parse_json

NOTHING = object()  # result for text that is not JSON


def depth_of(value: Any) -> int:
    """Slow reference."""
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


TEXT = st.text(alphabet='[]{}"\\,:ab\n', max_size=6)
JSON = st.recursive(
    TEXT | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


def nodes_in(value: Any) -> int:
    """Slow reference."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + sum(map(nodes_in, inner))


def commas_in(value: Any) -> int:
    """Slow reference."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(0, len(inner) - 1) + sum(map(commas_in, inner))


def keys_in(value: Any) -> int:
    """Slow reference."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return len(inner) * isinstance(value, dict) + sum(map(keys_in, inner))


@given(JSON, st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32", "utf-8-sig"]))
def test_a_shape_is_that_of_the_parsed_value(value: Any, encoding: str) -> None:
    text = json.dumps({"": value}, ensure_ascii=False)
    assert json_shape(text.encode(encoding)) == (
        1 + depth_of(value),
        1 + nodes_in(value),
        commas_in(value),
        1 + keys_in(value),
    )


@pytest.mark.parametrize(
    "body", [b"[" * 10_000_000, b"[" * 5_000_000 + b"]" * 5_000_000, b'{"a":' * 200 + b"1" + b"}" * 200]
)
def test_what_nests_without_end_is_too_deep(body: bytes) -> None:
    assert json_shape(body).depth > MAX_JSON_DEPTH


@pytest.mark.parametrize("body", [b"", b"[]" * 10_000, b'"' + b"[" * 10_000 + b'"', b"]" * 10_000])
def test_what_is_flat_is_not(body: bytes) -> None:
    assert json_shape(body).depth <= 1


def test_strings_are_followed_from_chunk_to_chunk() -> None:
    value = ["[" * 700_000, ["]" * 700_000, [[]]], {"a\\": '"['}]
    assert json_shape(json.dumps(value).encode()) == (4, 5, 3, 1)


def parsed_whole(body: bytes) -> Any:
    """Slow reference: it blocks the event loop."""
    try:
        return json.loads(body)
    except ValueError:
        return NOTHING


def parsed_in_pieces(body: bytes) -> Any:
    try:
        return parse_json(body)
    except ApiError as error:
        assert error.status == 400
        return NOTHING


@pytest.fixture
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "PIECE_BYTES", 8)
    monkeypatch.setattr(json_text, "_CHUNK_BYTES", 5)


@pytest.mark.usefixtures("tiny_pieces")
@given(JSON, st.sampled_from(["utf-8", "utf-16", "utf-32", "utf-8-sig"]), st.sampled_from([None, 1]))
def test_pieces_make_the_value_that_the_whole_makes(value: Any, encoding: str, indent: int | None) -> None:
    body = json.dumps(value, ensure_ascii=False, indent=indent).encode(encoding, "surrogatepass")
    found = parsed_in_pieces(body)
    assert found == value and json.dumps(found) == json.dumps(json.loads(body)), "keys keep their order"


@pytest.mark.usefixtures("tiny_pieces")
def test_pieces_take_and_refuse_what_the_whole_does() -> None:
    draw = random.Random(1)
    base = rb'{"a": [1, {"bc": "d,]"}, [], {}], "e\\": [[2, 3], "\u20ac"], "a": null}'
    num_refused = 0
    for _ in range(1000):
        body = bytearray(base)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(body))
            body[at : at + draw.randint(0, 2)] = draw.choice(
                [b"", b"[", b"]", b"{", b"}", b",", b":", b'"', b" ", b"1"]
            )
        whole, pieces = parsed_whole(bytes(body)), parsed_in_pieces(bytes(body))
        assert pieces == whole, bytes(body)
        num_refused += whole is NOTHING
    assert 500 < num_refused < 990


@pytest.mark.usefixtures("tiny_pieces")
def test_a_trouble_s_place_is_that_in_the_whole_text() -> None:
    with pytest.raises(ApiError, match=r"not valid JSON: Expecting value \(character 22\)"):
        parse_json('["\u20ac\u20ac\u20ac\u20ac\u20ac\u20ac\u20ac\u20ac", 1234567, oops]'.encode())


@pytest.mark.parametrize("padding", ["", "x" * 200_000], ids=["short", "in pieces"])
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_cannot_represent_is_refused_by_name(number: str, padding: str) -> None:
    for text in (number, f'[1, {number}, "{padding}"]', f'{{"a": "{padding}", "b": {{"c": {number}}}}}'):
        with pytest.raises(ApiError, match=f"{number} is (not JSON|too large)") as caught:
            parse_json(text.encode())
        assert caught.value.status == 400
    assert parse_json(f'["{number}", -1e308, 1e-999, "{padding}"]'.encode()) == [number, -1e308, 0.0, padding]


def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece blocks the event loop."""
    longest, decode = 0, json_text.decode_strictly

    def noting(text: str) -> Any:
        nonlocal longest
        longest = max(longest, len(text))
        return decode(text)

    value = {
        "messages": [{"role": "user", "content": [list(range(50_000))] * 3}],
        **{str(k): k for k in range(50_000)},
    }
    body = json.dumps(value).encode()
    monkeypatch.setattr(json_text, "decode_strictly", noting)
    assert parse_json(body) == value
    assert longest <= json_text.PIECE_BYTES + 2
    gc.collect()
