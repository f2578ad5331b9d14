"""What a way of tokens between ranks gives to the service's dispatcher on a device."""

from typing import NamedTuple, Protocol

from torch import Tensor

from dispatch.meanwhile import Meanwhile


class Packed(NamedTuple):
    """What a rank received; overwritten by the next dispatch."""

    x_NH: Tensor  # rows, contiguous; those that no pair names are undefined
    row_P: Tensor  # int64 [num_pairs]: the row of each pair
    slot_offsets: Tensor  # int64 [S+1]
    num_pairs: (
        int  # rows of `row_P` and of the answers: pairs, or room for them where the host does not count
    )


class Way(Protocol):
    """One way. Calls are collective, in the same order on all ranks; arguments are checked by the caller.

    Attributes:
        waited_ns: by dispatches and by combines so far; reading it may wait for the device.
        sent_bytes: likewise to each rank.
        is_replayable: whether calls may be captured in a CUDA graph.
    """

    is_replayable: bool

    @property
    def waited_ns(self) -> tuple[int, int]: ...
    @property
    def sent_bytes(self) -> tuple[list[int], list[int]]: ...

    def dispatch(self, x_TH: Tensor, slots_TK: Tensor, capacity: int, meanwhile: Meanwhile) -> Packed:
        """Send each token once to every rank that holds one of its choices.

        Args:
            x_TH: [T, H], contiguous. slots_TK: int64, contiguous; what is no slot is no choice.
            capacity: the most tokens of any rank; 0 for no limit.
            meanwhile: called while rows travel; what it launches comes before what waits for them.
        """
        ...

    def combine(self, y_PH: Tensor, weights_TK: Tensor, out_TH: Tensor, meanwhile: Meanwhile) -> None:
        """Bring the answers of the last dispatch home and sum them in the order of the choices.

        Args:
            y_PH: [num_pairs, H], contiguous. weights_TK: float32, contiguous. out_TH: contiguous.
            meanwhile: likewise, while answers travel.
        """
        ...

    def refuse(self, problem: str) -> None:
        """Stand in for one call whose arguments are bad; the caller raises."""
        ...

    def check(self) -> None:
        """Raise what went wrong in calls that did not wait to say so. Local; may wait for the device."""
        ...

    def close(self) -> None:
        """Release what it holds. Local."""
        ...
