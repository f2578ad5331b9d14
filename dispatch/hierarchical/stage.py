"""One of the two wires of node-limited dispatch, speaking of the whole group's ranks.

A wire numbers its own ranks; errors that leave here name the ranks the user knows. A refusal that was heard in
one stage is handed on in the next, so its text travels with the rank it is from in front: "5|slots_TK[0, 1] is ...".
A peer that is lost or late in one stage is known only to the ranks of that stage: the rank that finds out closes all,
so that those who wait for it in the other stage hear at once and not by time-out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Self

from dispatch.errors import DispatchError, DispatchTimeout, PeerLost, PeerRefused, RanksDisagree
from dispatch.hierarchical.messages import Message, num_bytes, swap
from dispatch.meanwhile import Meanwhile, nothing
from dispatch.wires.wire import Wire

_ORIGIN_END = "|"


class Stage:
    """Swap messages between some ranks of the group.

    Args:
        wire: between them.
        ranks: their numbers in the whole group, in the order of the wire's own.
        rank: this rank's number in the whole group.
        close: called when a peer is lost or late.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int], rank: int, close: Callable[[], None]) -> None:
        assert len(ranks) == wire.world_size, "every rank of the wire has a number"
        self.wire, self.ranks, self.rank = wire, ranks, rank
        self._close = close
        self.sent_bytes: Counter[tuple[int, int]] = Counter()  # by (first word, rank), headers included
        self.waited_ns: Counter[int] = Counter()  # in swaps, by first word

    def swap(
        self,
        messages: Sequence[Message],
        words: tuple[int, ...],
        expected: Sequence[Sequence[int]] | None = None,
        *,
        then: Sequence[Self] = (),
        meanwhile: Meanwhile = nothing,
    ) -> list[Message]:
        """Send one message to every rank of the stage and return what each sent. Collective.

        Args:
            messages: by rank; their words are `words`.
            words: what all ranks must have in common; the first is what the message is, the second the call.
            expected: see `messages.swap`.
            then: stages that ranks will meet in which have not heard of a refusal here; it is handed on to them.
            meanwhile: called while the messages travel; see there.

        Raises:
            PeerRefused, RanksDisagree: on every rank once `then` is done; the next call works.
            PeerLost, DispatchTimeout: everything is closed.
        """
        try:
            return self._swap(messages, words, expected, meanwhile)
        except (PeerRefused, RanksDisagree) as error:
            origin, text = (
                (error.rank, error.text) if isinstance(error, PeerRefused) else (self.rank, str(error))
            )
            for stage in then:
                stage.refuse(origin, text)
            raise

    def refuse(self, origin: int, text: str) -> None:
        """Tell the ranks of this stage, in place of its swap, that rank `origin` of the group refuses. Collective."""
        try:
            self.wire.refuse(f"{origin}{_ORIGIN_END}{text}")
        except DispatchError as error:
            raise self._translated(error) from error.__cause__

    def _swap(
        self,
        messages: Sequence[Message],
        words: tuple[int, ...],
        expected: Sequence[Sequence[int]] | None,
        meanwhile: Meanwhile,
    ) -> list[Message]:
        begun_ns = perf_counter_ns()
        try:
            received = swap(self.wire, messages, expected, meanwhile)
            self.waited_ns[words[0]] += perf_counter_ns() - begun_ns
            self._count(messages, words[0])
        except DispatchError as error:
            raise self._translated(error) from error.__cause__
        for peer, message in enumerate(received):
            theirs = message.words[: len(words)]
            if theirs != words:
                here = f"rank {self.rank} sent {list(words)}"
                what = "message, call and sizes"
                raise RanksDisagree(
                    f"rank {self.ranks[peer]} sent {list(theirs)} where {here} ({what}): "
                    "all ranks must make the same call with the same H, K, dtype and slots per rank"
                )
        return received

    def _translated(self, error: DispatchError) -> DispatchError:
        """Say the same of the group's ranks."""
        if isinstance(error, PeerRefused):
            origin, _, text = error.text.partition(_ORIGIN_END)
            return PeerRefused(int(origin), text)
        if isinstance(error, PeerLost | DispatchTimeout):
            self._close()
            if error.rank is not None:
                own, error.rank = error.rank, self.ranks[error.rank]
                error.args = (f"rank {error.rank}{str(error).removeprefix(f'rank {own}')}",)
        return error

    def _count(self, messages: Sequence[Message], kind: int) -> None:
        for rank, message in zip(self.ranks, messages, strict=True):
            if rank != self.rank:
                self.sent_bytes[kind, rank] += num_bytes(message)
