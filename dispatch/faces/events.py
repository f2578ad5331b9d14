"""DeepEP's events: a point in the work of a stream that another stream may wait for.

On the CPU a call has done its work when it returns. So every event has already happened, and waiting for it returns at
once. With CUDA, an event belongs to the current stream (never run on a GPU). Otherwise the classes keep DeepEP's
contract: only asynchronous calls return an event, and hooks run once, after the wait. So code that breaks the contract
fails here too, which is easier to debug than on the cluster.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch


class EventHandle:
    """An event of the stream that was current when it was made. On the CPU it has always happened."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for the event. Does nothing on the CPU."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """Result of a call that did not wait: wait later, or work first in a `with` block.

    Attributes:
        event: The EventHandle, or None if the call was not asynchronous.
        extra_tensors: Tensors that this object keeps alive.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None
        self._release_on_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Make the current stream wait for the event, then run the registered hook.

        Args:
            release_handle: Drop the event afterwards, and the tensors that it keeps alive.

        Raises:
            ValueError: This object has no event.
        """
        if self.event is None:
            raise ValueError(
                "this EventOverlap has no event to wait for; pass async_finish=True to the call that returned it"
            )
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Register a function that the next `current_stream_wait` calls once.

        Raises:
            ValueError: A hook is registered already.
        """
        if self._hook is not None:
            raise ValueError("a hook is already registered on this EventOverlap; only one is allowed")
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Set whether the end of the next `with` block drops the event: `with event(release_handle=True): ...`"""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release_on_exit)
        self._release_on_exit = False


def finished(async_finish: bool, extra_tensors: tuple[Any, ...] | None = None) -> EventOverlap:
    """Return the event of a finished call. It can be waited for only if the call was asynchronous."""
    return EventOverlap(EventHandle(), extra_tensors) if async_finish else EventOverlap()
