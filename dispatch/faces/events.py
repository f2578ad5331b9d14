"""DeepEP's events: a point in the work of a stream that another may wait for.

On the CPU a call has done its work when it returns, so that every event has happened when it can be asked for, and
waiting for it returns at once. Where CUDA is in use an event is one of the current stream (never run there). The classes keep DeepEP's contract otherwise (an event exists only where a call was
asked to finish asynchronously; hooks run once, after the wait), so that code which breaks it breaks here too, where
it is easy to see, and not on the cluster.
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
        """Let the current stream wait for it. On the CPU there is nothing to wait for."""
        if self._event is not None:
            self._event.wait()


class EventOverlap:
    """What calls return in place of waiting: wait later, or work first in a `with` block.

    Attributes:
        event: the EventHandle, None where the call did not finish asynchronously.
        extra_tensors: tensors kept alive until this object goes.
    """

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None
        self._release_on_exit = False

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Let the current stream wait for the event, then run the registered hook.

        Args:
            release_handle: drop the event afterwards, and what it keeps alive.

        Raises:
            ValueError: there is no event.
        """
        if self.event is None:
            raise ValueError(
                "this EventOverlap has no event to wait for; the call that returned it must get async_finish=True"
            )
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], Any]) -> None:
        """Have `hook_after_wait` called once, by the next `current_stream_wait`.

        Raises:
            ValueError: one is registered.
        """
        if self._hook is not None:
            raise ValueError("a hook is registered on this EventOverlap; it takes one at a time")
        self._hook = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Choose whether the end of the next `with` block drops the event: `with event(release_handle=True): ...`"""
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
    """Return the event of a call that is done: one to wait for if it was asked for, else an empty one."""
    return EventOverlap(EventHandle(), extra_tensors) if async_finish else EventOverlap()
