"""Incremental text against decoding all tokens at once."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from server.front.detokenizer import MAX_SHOWN, REPLACEMENT, Detokenizer, LoneTexts, StopScreen


class Windowed:
    """A decoder in which every token may depend on its neighbours."""

    def lone_texts(self, *, skip_special_tokens: bool) -> None:
        return None


class ByteDecoder(Windowed):
    """Token i is byte i. Tokens from 256 on are special and have no text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")


class ChunkDecoder(Windowed):
    """Token i is the i-th of these chunks of bytes."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self._chunks = chunks

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return b"".join(self._chunks[token_id] for token_id in token_ids).decode(errors="replace")


class JoiningDecoder(ChunkDecoder):
    """As `ChunkDecoder`, but tokens that are whole characters are looked up."""

    def lone_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None]:  # type: ignore[override]
        return LoneTexts(self, skip_special_tokens=skip_special_tokens)


class FallbackDecoder(Windowed):
    """SentencePiece with byte fallback, as `tokenizers` decodes it: blanks as U+2581, the first one dropped."""

    def __init__(self) -> None:
        self.words = ["▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
        self._tokenizer = Tokenizer(
            models.BPE(vocab={word: at for at, word in enumerate(self.words)}, merges=[])
        )
        self._tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def bytes_of(self, text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]


def pieces_of(detokenizer: Detokenizer, steps: Sequence[Sequence[int]]) -> list[str]:
    return [*(detokenizer.push(step) for step in steps), detokenizer.flush()]


@given(st.text(max_size=30), st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_the_pieces_make_up_the_text_and_never_hold_half_a_character(text: str, sizes: list[int]) -> None:
    token_ids = list(text.encode())
    steps: list[list[int]] = []
    at = 0
    while at < len(token_ids):
        size = sizes[len(steps) % len(sizes)]
        steps.append(token_ids[at : at + size])
        at += size
    pieces = pieces_of(Detokenizer(ByteDecoder(), [65]), steps)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.text("aé€😀", max_size=20))
def test_characters_that_every_token_cuts_are_whole(sizes: list[int], text: str) -> None:
    chunks: list[bytes] = []
    data = text.encode()
    while data:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(data[:size])
        data = data[size:]
    pieces = pieces_of(Detokenizer(ChunkDecoder(chunks), []), [[at] for at in range(len(chunks))])
    assert "".join(pieces) == text


def test_a_long_text_of_cut_characters_is_shown_as_it_comes() -> None:
    data = ("a" + 50 * "😀").encode()
    chunks = [data[at : at + 2] for at in range(0, len(data), 2)]
    detokenizer = Detokenizer(ChunkDecoder(chunks), [])
    pieces = [detokenizer.push([at]) for at in range(len(chunks))]
    assert max(map(len, pieces)) <= 3
    assert "".join(pieces) + detokenizer.flush() == data.decode()


@given(st.binary(max_size=40))
def test_bytes_that_are_no_text_are_shown_as_replacements_and_held_only_briefly(raw: bytes) -> None:
    detokenizer = Detokenizer(ByteDecoder(), [65])
    shown = ""
    for byte in raw:
        shown += detokenizer.push([byte])
        assert len(detokenizer._pending) <= 4
    shown += detokenizer.flush()
    whole = raw.decode(errors="replace")
    assert [char for char in shown if char != REPLACEMENT] == [char for char in whole if char != REPLACEMENT]


@given(
    st.lists(
        st.sampled_from([b"a", b"\x80", b"\x9f\x80", b"\xe2", b"\xe2\x82", b"\xf0\x9f", b"\xac"]), max_size=24
    ),
    st.lists(st.integers(1, 5), min_size=1, max_size=5),
)
@example(chunks=[b"\xe2\x82\xac", b"\xf0\x9f", b"\xac", b"\x9f\x80", b"\xac\xe2"], sizes=[5])
def test_the_text_does_not_depend_on_the_tokens_per_step(chunks: list[bytes], sizes: list[int]) -> None:
    """Drafts and moves to other ranks change them. With bytes that are no text, the replacements stay the same."""
    steps, at = list[range](), 0
    while at < len(chunks):
        steps.append(range(len(chunks))[at : at + sizes[len(steps) % len(sizes)]])
        at += len(steps[-1])
    one_by_one = [[each] for each in range(len(chunks))]
    decoder = ChunkDecoder(chunks)
    texts = ["".join(pieces_of(Detokenizer(decoder, []), each)) for each in (steps, one_by_one)]
    assert texts[0] == texts[1]


CHUNKS = [
    *(
        b"a",
        b"bc d",
        "é".encode(),
        "😀".encode(),
        REPLACEMENT.encode(),
        b"",
        b"\x80",
        b"\x9f\x80",
        b"\xe2",
        b"\xe2\x82",
    )
]
CHUNKS += [b"\xf0\x9f", b"\xac", b"\xac\xe2", b"a\xf0", b"\x80b"]


@given(
    st.lists(st.integers(0, len(CHUNKS) - 1), max_size=7),
    st.lists(st.integers(0, 3) | st.integers(0, len(CHUNKS) - 1), max_size=4 * MAX_SHOWN),
)
@example(prompt_ids=[12], token_ids=[11, 0, *[12] * 6, 0, *[1] * MAX_SHOWN, 8, 7])
def test_a_token_of_whole_characters_is_looked_up_with_the_same_result(
    prompt_ids: list[int], token_ids: list[int]
) -> None:
    """Also between bytes that are not valid UTF-8, with any context."""
    fast, slow = (Detokenizer(kind(CHUNKS), prompt_ids) for kind in (JoiningDecoder, ChunkDecoder))
    for token_id in token_ids:
        assert fast.push([token_id]) == slow.push([token_id])
        assert (fast._shown, fast._shown_text, fast._pending) == (
            slow._shown,
            slow._shown_text,
            slow._pending,
        )
    assert fast.flush() == slow.flush()


def test_a_token_of_whole_characters_is_decoded_once() -> None:
    decoder = JoiningDecoder([b"a", b"\xc3", b"\xa9"])
    decoded: list[list[int]] = []
    decode = decoder.decode

    def counting(token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        decoded.append(list(token_ids))
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    decoder.decode = counting  # type: ignore[method-assign]
    detokenizer = Detokenizer(decoder, [])
    assert [detokenizer.push([each]) for each in (0, 0, 0, 1, 2, 0)] == ["a", "a", "a", "", "é", "a"]
    assert decoded.count([0]) == 1 and [1] in decoded, "the other tokens are decoded with their context"


def test_a_character_appears_with_its_last_byte() -> None:
    pieces = pieces_of(Detokenizer(ByteDecoder(), []), [[byte] for byte in "é😀a".encode()])
    assert pieces == ["", "é", "", "", "", "😀", "a", ""]


def test_an_unfinished_character_at_the_end_becomes_a_replacement() -> None:
    assert pieces_of(Detokenizer(ByteDecoder(), []), [[65], [0xC3]]) == ["A", "", REPLACEMENT]


def test_special_tokens_have_no_text_and_hold_nothing_back() -> None:
    assert pieces_of(Detokenizer(ByteDecoder(), [300]), [[300], [65], [301, 66], []]) == [
        "",
        "A",
        "B",
        "",
        "",
    ]


def test_a_blank_before_the_first_word_is_kept_because_the_prompt_precedes_it() -> None:
    decoder = FallbackDecoder()
    assert "".join(pieces_of(Detokenizer(decoder, [0]), [[1], [2]])) == " world!"


@pytest.mark.parametrize("text", ["€", "😀😀😀", "né", "日本語"])
def test_byte_fallback_tokens_make_characters(text: str) -> None:
    decoder = FallbackDecoder()
    pieces = pieces_of(Detokenizer(decoder, [0]), [[token] for token in [*decoder.bytes_of(text), 2]])
    assert "".join(pieces) == text + "!"
    assert not any(REPLACEMENT in piece for piece in pieces)


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
    # The oracle checks character by character: the first stop string to be complete, and the longest of these.
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
