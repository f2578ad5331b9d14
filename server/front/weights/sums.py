"""Check sums of the weights of several ranks: joined if all copies are equal.

Legend: L MoE layers, E experts.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from scheduler.weights.versions import WeightReport

_DIGEST_DIGITS = 32


class Sums(NamedTuple):
    """Check sums of all ranks together."""

    plain: str
    experts_LE: np.ndarray

    @property
    def digest(self) -> str:
        """The digest of the version."""
        taken = hashlib.sha256(self.plain.encode())
        taken.update(self.experts_LE.astype("<u8").tobytes())
        return taken.hexdigest()[:_DIGEST_DIGITS]


def merge(reports: Iterable[WeightReport]) -> Sums | str:
    """Join the check sums of ranks. Returns a description instead if copies of a weight differ."""
    merged: Sums | None = None
    first = 0
    for report in reports:
        assert report.experts_LE is not None, "a rank that has loaded weights has their check sums"
        own_LE = report.experts_LE
        if merged is None:
            merged, first = Sums(report.plain, own_LE.copy()), report.rank
            continue
        if report.plain != merged.plain:
            return f"ranks {first} and {report.rank} have different weights outside the experts"
        both = (own_LE != 0) & (merged.experts_LE != 0)
        if differ := np.argwhere(both & (own_LE != merged.experts_LE)).tolist():
            layer, expert = differ[0]
            return f"rank {report.rank} has another copy of expert {expert} in MoE layer {layer} than an earlier rank"
        np.copyto(merged.experts_LE, own_LE, where=merged.experts_LE == 0)
    assert merged is not None, "some rank serves"
    return merged
