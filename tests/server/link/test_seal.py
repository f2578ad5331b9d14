"""The attacks that a cluster key stops, without a link. test_rank_link tests them with one."""

import pytest

from server.link.seal import Seal, SealError

KEY = b"k" * 32


def ends(rank_key: bytes | None = KEY, front_nonce: str = "b") -> tuple[Seal, Seal]:
    return (
        Seal(rank_key, is_front=False, rank_nonce="a", front_nonce=front_nonce),
        Seal(KEY, is_front=True, rank_nonce="a", front_nonce="b"),
    )


def test_messages_come_as_they_went_in_both_directions() -> None:
    rank, front = ends()
    assert [front.open(rank.seal(content)) for content in (b"one", b"", b"one")] == [b"one", b"", b"one"]
    assert rank.open(front.seal(b"two")) == b"two"


def test_without_a_key_messages_travel_as_they_are() -> None:
    assert Seal(None, is_front=False).seal(b"one") == b"one"


@pytest.mark.parametrize(
    "what", ["changed", "again", "left out", "sent back", "cut", "another stream", "another key"]
)
def test_what_the_other_end_did_not_say_next_is_refused(what: str) -> None:
    rank, front = ends(
        rank_key=b"x" * 32 if what == "another key" else KEY,
        front_nonce="c" if what == "another stream" else "b",
    )
    first = rank.seal(b"one")
    if what == "again":
        front.open(first)
    sealed = {
        "changed": first[:-1] + b"f",
        "left out": rank.seal(b"two"),
        "sent back": front.seal(b"one"),
        "cut": first[:20],
    }.get(what, first)
    with pytest.raises(SealError, match="cluster key"):
        front.open(sealed)
