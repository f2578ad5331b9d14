"""The text of many choices at once: whole characters only, and never the beginning of a stop string."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.request import FinishReason, Logprobs, RequestOutput
from server.front.detokenizer import REPLACEMENT
from server.front.generations import (
    MAX_UNREAD_TOKENS,
    UNREAD_S,
    Answer,
    ClientGone,
    Generation,
    Pieces,
    Reader,
    one_by_one,
)
from tests.support.requests.answers import ByteDecoder, ask_of
from tests.support.requests.desk import Desk, in_loop

ALPHABET = "aé€😀<>"
WORDS = st.text(ALPHABET, min_size=1, max_size=3)


def choices(count: int, stops: tuple[str, ...]) -> list[Generation]:
    """Return the choices of one answer."""
    answer = Answer("a", lambda _: None)
    return [answer.add(ask_of(stops=stops, max_tokens=999), 0, ByteDecoder()) for _ in range(count)]


def first_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The oracle: the shown part of a whole text and its stop string. If several end together, the longest counts."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


def push(choice: Generation, token_ids: Sequence[int], *, last: bool) -> FinishReason | None:
    reason = FinishReason.LENGTH if last else None
    return choice.push(RequestOutput(request_id="r", token_ids=list(token_ids), finish_reason=reason))


@given(
    st.lists(st.text(ALPHABET, max_size=12), min_size=2, max_size=4),
    st.lists(WORDS, min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_choices_that_grow_side_by_side_show_whole_characters_and_no_head_of_a_stop_string(
    texts: list[str], stops: tuple[str, ...], sizes: list[int]
) -> None:
    growing = dict(enumerate(choices(len(texts), stops)))
    left = [list(text.encode()) for text in texts]
    shown, turn = [""] * len(texts), 0
    ended: list[str | int | None] = [None] * len(texts)
    while growing:
        for index, choice in list(growing.items()):  # in turn, as steps bring tokens of all choices
            size = sizes[turn % len(sizes)]
            turn += 1
            token_ids, left[index] = left[index][:size], left[index][size:]
            reason = push(choice, token_ids, last=not left[index])
            piece = choice.take()
            assert REPLACEMENT not in piece.text
            shown[index] += piece.text
            expected, _ = first_stop(texts[index], stops)
            assert expected.startswith(shown[index]), "no text is shown that must be taken back"
            if reason is not None:
                ended[index] = piece.stop_reason
                del growing[index]
    assert list(zip(shown, ended, strict=True)) == [first_stop(text, stops) for text in texts]


def test_a_stop_string_cut_inside_a_character_is_found() -> None:
    [choice] = choices(1, ("€!", "zz"))
    raw = "a€!b".encode()
    assert [push(choice, [byte], last=False) for byte in raw[:4]] == [None] * 4
    assert choice.take().text == "a"
    assert push(choice, raw[4:], last=False) is FinishReason.STOP
    piece = choice.take()
    assert (piece.text, piece.stop_reason) == ("", "€!")


def test_prompt_logprobs_are_kept_for_the_endpoint() -> None:
    [choice] = choices(1, ())
    of_prompt = [Logprobs(66, -1.0, [], [])]
    choice.push(RequestOutput(request_id="r", token_ids=[67], prompt_logprobs=of_prompt))
    assert choice.prompt_logprobs == of_prompt


def test_logprobs_that_are_left_unread_for_long_are_too_many() -> None:
    def feed(choice: Generation, num_tokens: int) -> None:
        logprobs = [Logprobs(65, -1.0, [], [])] * num_tokens
        choice.push(RequestOutput(request_id="r", token_ids=[65] * num_tokens, logprobs=logprobs))

    [choice] = choices(1, ())
    feed(choice, MAX_UNREAD_TOKENS + 1)
    assert not choice.is_left_unread(10.0), "a paused front gets many tokens at once"
    assert not choice.is_left_unread(10.0 + UNREAD_S) and choice.is_left_unread(10.1 + UNREAD_S)
    assert len(choice.take().logprobs) == MAX_UNREAD_TOKENS + 1
    feed(choice, MAX_UNREAD_TOKENS)
    assert not choice.is_left_unread(20.0) and not choice.is_left_unread(99.0), "the limit is not exceeded"
    [plain] = choices(1, ())
    push(plain, b"x" * 2 * MAX_UNREAD_TOKENS, last=False)
    assert not plain.is_left_unread(0.0) and not plain.is_left_unread(99.0), "text is small"


def test_several_tokens_at_once_end_at_the_one_that_completes_a_stop_string() -> None:
    """The same as one by one: tokens after the stop string are neither counted nor shown."""
    together, apart = choices(1, ("<>",))[0], choices(1, ("<>",))[0]
    token_ids = list(b"a<>b>")
    logprobs = [Logprobs(token_id, -1.0, [], []) for token_id in token_ids]
    output = RequestOutput(
        request_id="r",
        token_ids=token_ids,
        logprobs=logprobs,
        num_draft_tokens=6,
        finish_reason=FinishReason.LENGTH,
    )
    assert together.push(output) is FinishReason.STOP
    reasons = [apart.push(each) for each in one_by_one(output)[:3]]
    assert reasons == [None, None, FinishReason.STOP]
    assert together.take() == apart.take()
    assert (together.num_tokens, together.num_draft_tokens, together.num_accepted_tokens) == (3, 6, 4)


def test_several_tokens_without_a_stop_string_keep_their_end() -> None:
    [choice] = choices(1, ("<>",))
    assert push(choice, b"ab<", last=True) is FinishReason.LENGTH
    assert (choice.take().text, choice.num_tokens) == ("ab<", 3)


class Recorder:
    """A reader that records the texts of the pieces that it takes, by choice."""

    def __init__(self) -> None:
        self.taken: list[dict[int, str]] = []
        self.is_free = True

    def take(self, pieces: Pieces) -> None:
        """Record pieces; "!" is an error."""
        self.taken.append({index: piece.text for index, piece in pieces})
        if any("!" in piece.text for _, piece in pieces):
            raise ValueError("a piece that cannot be written")

    def reader(self) -> Reader:
        """Return the reader."""
        return Reader(self.take, lambda: self.is_free)


async def _waiting(answer: Answer, recorder: Recorder) -> "asyncio.Task[Pieces]":
    """Return a task that waits for an answer."""
    task = asyncio.create_task(answer.next(recorder.reader()))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def _outputs(*texts: str, finish: FinishReason | None = None) -> list[RequestOutput]:
    """Return outputs of the choices a, b, ...; the last one may end."""
    outputs = [
        RequestOutput(request_id="abc"[at], token_ids=list(text.encode())) for at, text in enumerate(texts)
    ]
    outputs[-1].finish_reason = finish
    return outputs


@in_loop
async def test_a_waiting_reader_takes_the_pieces_of_a_step_at_once_and_the_task_sleeps() -> None:
    desk, recorder = Desk(num_ranks=1), Recorder()
    answer = desk.open("a", "b")
    task = await _waiting(answer, recorder)
    desk.requests.deliver(0, _outputs("x", "y"))
    assert recorder.taken == [{0: "x", 1: "y"}], "before the event loop turns"
    desk.requests.deliver(0, [*_outputs("1"), *_outputs("2"), *_outputs("")])
    assert recorder.taken[1:] == [{0: "12"}], "outputs of several steps in one message"
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    answer.close()
    with pytest.raises(ClientGone):
        await task


@in_loop
async def test_the_last_piece_of_a_choice_goes_to_the_task_with_those_of_the_same_step() -> None:
    desk, recorder = Desk(num_ranks=1), Recorder()
    answer = desk.open("a", "b")
    task = await _waiting(answer, recorder)
    desk.requests.deliver(0, _outputs("x", "y", finish=FinishReason.LENGTH))
    desk.requests.deliver(0, _outputs("z"))
    assert recorder.taken == []
    pieces = await task
    assert [(index, piece.text, piece.finish_reason) for index, piece in pieces] == [
        (0, "xz", None),
        (1, "y", FinishReason.LENGTH),
    ]
    task = await _waiting(answer, recorder)
    desk.requests.deliver(0, _outputs("w"))
    assert recorder.taken == [{0: "w"}], "the other choice goes on"
    desk.requests.deliver(0, _outputs("", finish=FinishReason.STOP))
    assert dict(await task)[0].finish_reason is FinishReason.STOP
    assert await answer.next(recorder.reader()) == []


@in_loop
async def test_a_reader_that_is_not_free_leaves_the_pieces_to_the_task() -> None:
    desk, recorder = Desk(num_ranks=1), Recorder()
    answer = desk.open("a")
    task = await _waiting(answer, recorder)
    recorder.is_free = False
    desk.requests.deliver(0, _outputs("x"))
    recorder.is_free = True
    desk.requests.deliver(0, _outputs("y"))
    assert recorder.taken == [], "a later piece does not overtake"
    assert [piece.text for _, piece in await task] == ["xy"]
    desk.requests.deliver(0, _outputs("z"))
    assert [piece.text for _, piece in await answer.next(recorder.reader())] == ["z"], "no task waited"
    answer.close()


@in_loop
async def test_an_error_of_a_reader_is_its_task_s_and_the_other_answers_of_the_step_go_on() -> None:
    desk, broken, whole = Desk(num_ranks=1), Recorder(), Recorder()
    first, second = desk.open("a"), desk.open("b")
    tasks = [await _waiting(first, broken), await _waiting(second, whole)]
    desk.requests.deliver(0, _outputs("!", "y"))
    assert whole.taken == [{0: "y"}]
    desk.requests.deliver(0, _outputs("x"))
    assert len(broken.taken) == 1
    with pytest.raises(ValueError, match="cannot be written"):
        await tasks[0]
    tasks[1].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    desk.requests.deliver(0, _outputs("", "z"))
    assert len(whole.taken) == 1, "a cancelled task has no reader"
    first.close()
    second.close()
    assert desk.reasons() == [FinishReason.ABORT] * 2


@in_loop
async def test_an_answer_without_a_desk_hands_out_each_piece() -> None:
    answer, recorder = Answer("a", lambda _: None), Recorder()
    choice = answer.add(ask_of(), 0, ByteDecoder())
    task = await _waiting(answer, recorder)
    for text in "xy":
        push(choice, text.encode(), last=False)
        choice.notify()
    assert recorder.taken == [{0: "x"}, {0: "y"}]
    task.cancel()
