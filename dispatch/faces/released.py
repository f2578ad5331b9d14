"""How a buffer of either interface of DeepEP ends."""

from collections.abc import Callable
from typing import Any


class Released:
    """Mixed into the buffers."""

    explicitly_destroy: bool
    runtime: Any
    _close: Callable[[], Any]

    def destroy(self) -> None:
        """Release the wire; peers that still wait for this rank get PeerLost. Local.

        Raises:
            ValueError: the buffer was made without explicitly_destroy=True.
        """
        if not self.explicitly_destroy:
            raise ValueError(
                "explicitly_destroy is False; a buffer that is made so is released with its last user"
            )
        self._close()
        self.runtime = None
