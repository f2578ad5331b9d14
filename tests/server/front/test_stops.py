"""Stop strings, against an oracle that sees the whole text at once."""

from hypothesis import given
from hypothesis import strategies as st

from server.front.detokenizer import StopScreen

WORDS = st.text("ab<", min_size=1, max_size=4)


def screened(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    screen = StopScreen(stops, include_stop=include)
    shown = ""
    for piece in pieces:
        text, stop = screen.push(piece)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + screen.flush(), None


@given(st.lists(WORDS, max_size=12), st.lists(WORDS, min_size=1, max_size=3))
def test_the_text_ends_at_the_first_stop_string_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    whole = "".join(pieces)
    # Character by character is the oracle: the first stop string to be complete, the longest of those.
    ends = [(end, stop) for end in range(1, len(whole) + 1) for stop in stops if whole[:end].endswith(stop)]
    if not ends:
        assert screened(pieces, tuple(stops)) == (whole, None)
        return
    first = min(end for end, _ in ends)
    stop = max((stop for end, stop in ends if end == first), key=len)
    assert screened(pieces, tuple(stops)) == (whole[: first - len(stop)], stop)
    assert screened(pieces, tuple(stops), include=True) == (whole[:first], stop)


@given(st.lists(WORDS, max_size=12), st.lists(WORDS, min_size=1, max_size=3))
def test_nothing_is_shown_that_any_continuation_would_take_back(pieces: list[str], stops: list[str]) -> None:
    screen = StopScreen(tuple(stops))
    shown, seen = "", ""
    for piece in pieces:
        text, stop = screen.push(piece)
        shown, seen = shown + text, seen + piece
        if stop is not None:
            break
        for rest in (each[at:] for each in stops for at in range(len(each))):
            assert screened([seen + rest], tuple(stops))[0].startswith(shown)


def test_the_head_of_a_stop_string_is_shown_once_it_turns_out_otherwise() -> None:
    screen = StopScreen(("<end>",))
    assert screen.push("a<en") == ("a", None)
    assert screen.push("t") == ("<ent", None)
    assert screen.push("<") == ("", None)
    assert screen.flush() == "<"


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert StopScreen(()).push("x<") == ("x<", None)


def test_text_that_is_not_screened_takes_along_what_was_held() -> None:
    screen = StopScreen(("ab",))
    assert screen.push("a") == ("", None)
    assert screen.pass_by("b") == "ab"
