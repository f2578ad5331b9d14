"""What the scheduler and the sampler ask of whatever holds an answer to its form.

The form itself (`scheduler.policy.request.Structure`) is compiled by `scheduler.structure.compiling`. Knows no grammar, no
torch and no library: policy and sequence import it.

Legend: V vocabulary.
"""

from typing import Protocol

import numpy as np

Row = np.ndarray[tuple[int], np.dtype[np.float32]]


class StructureError(ValueError):
    """A form that cannot be compiled; the message says why, in words for the client."""


class StructureMatcher(Protocol):
    """One request's place in its form. It follows the request's tokens, never the batch's."""

    @property
    def has_ended(self) -> bool:
        """Whether the form is complete and nothing can follow."""

    @property
    def failure(self) -> str:
        """Why the request cannot go on; empty while it can."""

    def mask(self, logits_V: Row) -> None:
        """Set what may not come next to -inf, in place. A matcher that fails leaves the row and says why."""

    def advance(self, token_id: int) -> None:
        """Follow a token that was sampled; one that the form does not allow is a failure."""
