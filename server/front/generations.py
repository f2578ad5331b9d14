"""A client's answer while it grows: its choices, which ranks generate, and their text.

`Generation` is one choice: one request at one rank. `Answer` is the result of one HTTP request: 1 to n choices.
A step's pieces go to the answer's reader while its task waits (`Reader`): waking a task for each costs more than
everything else. Output that arrives while the client is slow is merged into the choice's next piece. So a slow reader delays nothing
else and costs no more memory than its answer's text. Log-probabilities are a hundred times larger: a client that
leaves many of them unread for long loses its answer. It depends on no rank, journal or HTTP; `requests` feeds it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from scheduler.policy.request import FinishReason, Logprobs, Request, RequestOutput
from server.front.detokenizer import Decoder, Detokenizer, StopScreen
from server.front.errors import ApiError


class Asker(NamedTuple):
    """Identity of a client, used for routing and fairness."""

    key_id: str = ""  # digest of the API key; "" if the service needs no key
    session: str = ""  # requests of one session prefer one rank; "" for none
    most_choices: int | None = None  # limit of an answer's choices at ranks at once; None for no limit


NOBODY = Asker()
MAX_UNREAD_TOKENS = 1024  # with log-probabilities; encoding this number with 20 each takes 60 ms
UNREAD_S = 5.0  # time that more may stay unread: a front that was stalled receives all of them at once


class Follower(Protocol):
    """The state of a regex search in one growing text."""

    def push(self, text: str) -> int | None:
        """Add text; return the offset in it where the first match ends, or None without a match."""
        ...


class Pattern(Protocol):
    """A compiled regex that ends a text, implemented by `scheduler.structure.stop_pattern`."""

    regex: str

    def open(self) -> Follower:
        """Start a search."""
        ...


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One requested choice: the request for the rank, and how its tokens become text."""

    request: Request
    stops: tuple[str, ...] = ()
    patterns: tuple[Pattern, ...] = ()  # a match is shown and ends the text
    include_stop: bool = False  # show the stop string or token that ended the text
    skip_special_tokens: bool = True
    hidden_ids: frozenset[int] = frozenset()  # special tokens to hide even if others are shown
    eos_ids: frozenset[int] = frozenset()  # the model's own stop tokens, as opposed to the client's
    images: tuple[object, ...] = ()  # the files of its images' rows exist as long as these


@dataclass(slots=True)
class Piece:
    """The output of a choice since it was last taken."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the client's stop string or token, if one ended it
    matched_stop: str | int | None = None  # stop_reason, or the model's end-of-sequence token
    # The length of the text after each token with log-probabilities.
    ends: list[int] = field(default_factory=list)


Pieces = list[tuple[int, Piece]]  # with the choices' indexes, at most one per choice


class Reader(NamedTuple):
    """Takes pieces at once, in the step that brings them, while the task that reads the answer waits in `Answer.next`.

    The last piece of each choice goes to the task, and also every piece while the reader is not free.
    """

    take: Callable[[Pieces], None]
    is_free: Callable[[], bool] = lambda: True


class ClientGone(Exception):  # noqa: N818 - not a fault
    """The client disconnected, so this answer has no reader."""


class Generation:
    """One choice, fed by its rank."""

    def __init__(
        self,
        ask: Ask,
        index: int,
        rank: int,
        decoder: Decoder,
        on_ready: Callable[["Generation"], None],
    ) -> None:
        self.ask = ask
        self.index = index
        self.rank = rank
        self.asker = NOBODY
        self.was_submitted = False  # whether a rank has it, or had it
        self.num_moves = 0  # number of times that a rank released it, except draining ranks
        self.is_resuming = False  # whether it has tokens and waits for the first one after a move
        self.is_handed_over = False  # whether that move was a hand-over
        self.expected_at: int | None = None  # the rank that loads its blocks while another one computes them
        self.num_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_cached_tokens = 0
        self.num_host_tokens = self.num_disk_tokens = self.num_peer_tokens = 0  # parts of them
        self.submitted_s = ask.request.arrival_s  # time of submission to the present rank
        self.queued_s = 0.0  # from arrival to the start on the rank that produced the first token
        self.prompt_logprobs: list[Logprobs] = []  # of prompt tokens 1 and up; they come with the first token
        self.first_token_s: float | None = None
        self.last_token_s = ask.request.arrival_s
        self.finished = False
        # Label of the weights that drew the last token; set with the end, "" if they have none.
        self.weight_version = ""
        self.failure: ApiError | None = None
        self._on_ready = on_ready
        self._detokenizer = Detokenizer(
            decoder, ask.request.prompt_ids, skip_special_tokens=ask.skip_special_tokens
        )
        self._screen = StopScreen(ask.stops, include_stop=ask.include_stop)
        self._followers = [(pattern.regex, pattern.open()) for pattern in ask.patterns]
        self._is_searched = bool(ask.stops or ask.patterns)
        self._piece = Piece()
        self._unread_since_s: float | None = None  # for log-probabilities

    def push(self, output: RequestOutput) -> FinishReason | None:
        """Add a rank's output; return the finish reason if the choice ended.

        A stop string ends the choice here, before the rank is notified. If a step yields several tokens, the choice ends at the
        one that completes the stop string.
        """
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += max(0, len(output.token_ids) - 1)
        is_cut = self._is_searched or self.ask.request.params.num_logprobs is not None
        if len(output.token_ids) <= 1 or not is_cut:
            return self._push(output)
        for each in one_by_one(output):
            reason = self._push(each)
            if reason is not None:
                return reason
        return None

    def _push(self, output: RequestOutput) -> FinishReason | None:
        if not self.num_tokens:
            self._take_beginning(output)
        self.num_tokens += len(output.token_ids)
        piece = self._piece
        piece.token_ids += output.token_ids
        piece.logprobs += output.logprobs
        text = self._detokenizer.push(self._visible(output))
        if output.finish_reason is not None:
            text += self._detokenizer.flush()
        reason = self._show(text, output)
        if output.logprobs:
            piece.ends.append(len(piece.text))
        return reason

    def _show(self, text: str, output: RequestOutput) -> FinishReason | None:
        """Screen the text of an output's tokens; return the finish reason if the choice ended."""
        piece, stop = self._piece, None
        if not self._is_searched:
            piece.text += text
            return output.finish_reason
        is_early = self.num_tokens <= self.ask.request.params.min_tokens
        if is_early:
            shown = self._screen.pass_by(text)
        else:
            shown, stop = self._screen.push(text)
        if stop is None and output.finish_reason is not None:
            shown += self._screen.flush()
        at, regex = self._first_match(shown)
        if regex is not None and not is_early:
            shown, stop = shown[:at], regex
        piece.text += shown
        if stop is None:
            return output.finish_reason
        piece.stop_reason = piece.matched_stop = stop
        return FinishReason.STOP

    def _first_match(self, text: str) -> tuple[int, str | None]:
        """Search a text for the stop regexes; return the end of the earliest match and its regex."""
        ends = [(follower.push(text), regex) for regex, follower in self._followers]
        return min(((at, regex) for at, regex in ends if at is not None), default=(len(text), None))

    def _take_beginning(self, output: RequestOutput) -> None:
        """Record values of the choice's first token. After a replay, another rank's first token does not count."""
        if output.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
            self.num_host_tokens, self.num_disk_tokens = output.num_host_tokens, output.num_disk_tokens
            self.num_peer_tokens = output.num_peer_tokens
        before_s = self.submitted_s - self.ask.request.arrival_s
        self.queued_s = max(self.queued_s, before_s + output.queued_s)
        self.prompt_logprobs += output.prompt_logprobs

    def move(self, rank: int, now_s: float) -> None:
        """Continue on another rank, which has not seen the choice yet."""
        self.rank, self.was_submitted = rank, True
        self.submitted_s = now_s

    def end(self, reason: FinishReason, failure: ApiError | None = None) -> None:
        """Close the choice; if `failure` is set, the client gets it instead of an answer."""
        assert not self.finished, "a choice ends once"
        self.finished = True
        self.failure = failure
        if failure is not None:
            self._piece = Piece()  # it will not be read any more
        self._piece.finish_reason = reason
        self._on_ready(self)

    def notify(self) -> None:
        """Wake the reader if there is output."""
        if self._piece.text or self._piece.token_ids:
            self._on_ready(self)

    def take(self) -> Piece:
        """Return the output since the last call, and clear it."""
        piece, self._piece, self._unread_since_s = self._piece, Piece(), None
        return piece

    def is_left_unread(self, now_s: float) -> bool:
        """Return whether the reader has left many log-probabilities unread for long."""
        if not self._piece.logprobs:
            return False
        if self._unread_since_s is None:
            self._unread_since_s = now_s
        return len(self._piece.logprobs) > MAX_UNREAD_TOKENS and now_s - self._unread_since_s > UNREAD_S

    def _visible(self, output: RequestOutput) -> list[int]:
        """Return the tokens to show. The stop token that ended the answer is hidden unless the client requested it."""
        hidden = self.ask.hidden_ids
        token_ids = self._without_stop(output)
        return [each for each in token_ids if each not in hidden] if hidden else token_ids

    def _without_stop(self, output: RequestOutput) -> list[int]:
        token_ids, stop_ids = output.token_ids, self.ask.request.params.stop_token_ids
        if output.finish_reason is not FinishReason.STOP or not token_ids or token_ids[-1] not in stop_ids:
            return token_ids
        self._piece.matched_stop = token_ids[-1]
        if token_ids[-1] not in self.ask.eos_ids:
            self._piece.stop_reason = token_ids[-1]
        return token_ids if self.ask.include_stop else token_ids[:-1]


def one_by_one(output: RequestOutput) -> list[RequestOutput]:
    """Split an output into one per token. The first keeps the prompt's log-probabilities, the last the finish reason."""
    last = len(output.token_ids) - 1
    return [
        replace(
            output,
            token_ids=[token_id],
            logprobs=output.logprobs[place : place + 1],
            prompt_logprobs=output.prompt_logprobs if place == 0 else [],
            finish_reason=output.finish_reason if place == last else None,
            error=output.error if place == last else "",
        )
        for place, token_id in enumerate(output.token_ids)
    ]


class Answer:
    """The choices of one HTTP request. One coroutine reads them."""

    def __init__(
        self,
        request_id: str,
        on_close: Callable[["Answer"], None],
        on_due: Callable[["Answer"], None] | None = None,
    ) -> None:
        """Args: on_due is called when there are pieces for the waiting reader; `hand_out` must follow at the end of the step.
        None hands out each piece at once.
        """
        self.request_id = request_id
        self.generations: list[Generation] = []
        self._on_close = on_close
        self._on_due = on_due or Answer.hand_out
        self._ready: deque[Generation] = deque()
        self._wake = asyncio.Event()
        self._reader: Reader | None = None  # set while the task waits and has not been woken
        self._is_due = False
        self._error: Exception | None = None  # of the reader
        self._num_open = 0
        self._closed = False

    def add(self, ask: Ask, rank: int, decoder: Decoder) -> Generation:
        """Add the next choice."""
        generation = Generation(ask, len(self.generations), rank, decoder, self._note)
        self.generations.append(generation)
        self._num_open += 1
        return generation

    def prompt_logprobs_of(self, index: int, n: int) -> list[Logprobs]:
        """Return the log-probabilities of a choice's prompt. If only the first of n choices has them, return those."""
        return self.generations[index].prompt_logprobs or self.generations[index - index % n].prompt_logprobs

    async def next(self, reader: Reader | None = None) -> Pieces:
        """Wait for pieces and return them, or an empty list if every choice has ended.

        Args:
            reader: Takes the pieces that come while this call waits. None returns all pieces.

        Raises:
            ApiError: A choice failed, and the answer with it.
            ClientGone: `close` was called.
            Exception: The reader raised it.
        """
        while not self._ready and self._error is None:
            if self._closed:
                raise ClientGone
            if self._num_open == 0:
                return []
            self._wake.clear()
            self._reader = reader
            try:
                await self._wake.wait()
            finally:
                self._reader = None
        if self._closed:
            raise ClientGone
        if self._error is not None:
            raise self._error
        return self._take_ready()

    def hand_out(self) -> None:
        """Pass the pieces of a step to the reader. If it is not free, or the task was woken meanwhile, the task takes them."""
        self._is_due = False
        reader = self._reader
        if reader is None:
            return
        if not reader.is_free():
            self._wake_task()
            return
        try:
            reader.take(self._take_ready())
        except Exception as error:  # noqa: BLE001 - `next` raises it; the other answers of the step go on
            self._error = error
            self._wake_task()

    def close(self) -> None:
        """End open choices, because the reader is finished or gone. May be called again."""
        if not self._closed:
            self._closed = True
            self._on_close(self)
            self._wake_task()

    def _take_ready(self) -> Pieces:
        pieces: Pieces = []
        while self._ready:
            generation = self._ready.popleft()
            if generation.failure is not None:
                raise generation.failure
            piece = generation.take()
            self._num_open -= piece.finish_reason is not None
            pieces.append((generation.index, piece))
        return pieces

    def _note(self, generation: Generation) -> None:
        if generation not in self._ready:
            self._ready.append(generation)
        if self._reader is None or generation.finished:
            self._wake_task()
        elif not self._is_due:
            self._is_due = True
            self._on_due(self)

    def _wake_task(self) -> None:
        self._reader = None
        self._wake.set()
