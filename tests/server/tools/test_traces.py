"""Traces are read line by line, scaled and repeated, and errors name the broken line."""

from itertools import islice
from pathlib import Path

import pytest

from server.tools.traces import TracedRequest, TraceError, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.9799600,3180,8

2023-11-16 18:17:07.9799600,110,27"""
MOONCAKE = """{"timestamp": 1000, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 3000, "input_length": 512, "output_length": 6, "hash_ids": [0]}
{"timestamp": 3000, "input_length": 1025, "output_length": 7}
"""


def _file(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_both_formats_give_times_from_the_first_request_on(tmp_path: Path) -> None:
    assert list(read_trace(_file(tmp_path, AZURE))) == [
        TracedRequest(pytest.approx(0.0), 4808, 10, ()),
        TracedRequest(pytest.approx(1.0), 3180, 8, ()),
        TracedRequest(pytest.approx(4.0), 110, 27, ()),
    ]
    assert list(read_trace(_file(tmp_path, MOONCAKE))) == [
        TracedRequest(0.0, 1000, 5, (0, 1)),
        TracedRequest(2.0, 512, 6, (0,)),
        TracedRequest(2.0, 1025, 7, ()),
    ]


def test_a_mark_of_byte_order_and_quoted_columns_are_read(tmp_path: Path) -> None:
    for text in (AZURE, MOONCAKE, AZURE.replace("TIMESTAMP,ContextTokens", '"TIMESTAMP","ContextTokens"')):
        plain = list(read_trace(_file(tmp_path, text)))
        assert list(read_trace(_file(tmp_path, "\ufeff" + text))) == plain and len(plain) == 3


def test_a_scaled_trace_is_repeated_with_other_prefixes_until_its_duration(tmp_path: Path) -> None:
    requests = list(read_trace(_file(tmp_path, MOONCAKE), rate_scale=2.0, duration_s=3.0))
    # A lap lasts 1 s for its requests and 0.5 s for the gap to the next.
    assert [each.arrival_s for each in requests] == [0.0, 1.0, 1.0, 1.5, 2.5, 2.5]
    assert [each.hash_ids for each in requests] == [(0, 1), (0,), (), (2, 3), (2,), ()]


def test_a_duration_cuts_a_longer_trace(tmp_path: Path) -> None:
    assert len(list(read_trace(_file(tmp_path, AZURE), duration_s=2.0))) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", r"line 1: the line is 'a,b'; a trace begins with TIMESTAMP"),
        (AZURE.replace("3180", "many"), r"line 3: ContextTokens is 'many'; it must be a whole number from 1"),
        (AZURE.replace("3180,8", "3180"), r"line 3: the line has 2 columns; the header has 3"),
        (AZURE.replace("18:17:04.", "yesterday"), r"line 3: TIMESTAMP is .*; it must be a time such as"),
        (
            AZURE.replace("18:17:07.", "18:17:01."),
            r"line 5: the request arrived 3 s before the previous line; sort",
        ),
        (MOONCAKE.replace("512,", "0,"), r"line 2: input_length is 0; it must be a whole number"),
        (MOONCAKE.replace("[0]", "[0, 1]"), r"line 2: hash_ids has 2 ids for 512 tokens; .* would be 1"),
        (MOONCAKE.replace("[0]", '"0"'), r"line 2: hash_ids is '0'; it must be a list"),
        (MOONCAKE.replace('"output_length": 6, ', ""), r"line 2: output_length is missing"),
        (MOONCAKE.replace("3000,", "true,", 1), r"line 2: timestamp is True; it must be milliseconds"),
        (MOONCAKE.replace("3000,", "NaN,", 1), r"line 2: timestamp is nan; it must be milliseconds"),
        (MOONCAKE.replace("3000,", "1e999,", 1), r"line 2: timestamp is inf; it must be milliseconds"),
        (
            MOONCAKE.replace("3000,", "9" * 400 + ",", 1),
            r"line 2: timestamp is 9+...; it must be milliseconds",
        ),
        (MOONCAKE.replace("3000,", "9" * 5000 + ",", 1), r"line 2: cannot read the line"),
        (
            MOONCAKE.replace("512,", "512000000000,"),
            r"line 2: input_length is 512000000000; .* 1 to 100000000",
        ),
        (MOONCAKE.replace("[0]}", "[0]"), r"line 2: not JSON"),
        (MOONCAKE + "[]\n", r"line 4: timestamp, input_length, output_length is missing"),
        ("\n\n", r"has no requests"),
    ],
)
def test_a_broken_line_is_named_by_its_number(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said) as caught:
        list(read_trace(_file(tmp_path, text)))
    assert "\n" not in str(caught.value)


def test_lines_before_a_broken_one_are_read(tmp_path: Path) -> None:
    assert len(list(islice(read_trace(_file(tmp_path, AZURE.replace("27", "x"))), 2))) == 2


def test_files_that_are_none_and_times_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot parse .* as a trace"):
        next(read_trace(tmp_path / "absent"))
    with pytest.raises(TraceError, match="scale is 0; it must be above 0"):
        next(read_trace(_file(tmp_path, AZURE), rate_scale=0))
    with pytest.raises(TraceError, match="duration is -1 s; it must be above 0"):
        next(read_trace(_file(tmp_path, AZURE), duration_s=-1))
    one = _file(tmp_path, AZURE.splitlines()[0] + "\n" + AZURE.splitlines()[1])
    assert len(list(read_trace(one, duration_s=3.0))) == 3  # one per second, because a single line has no gap
