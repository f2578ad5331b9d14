"""Check sums of the weights of several ranks: joined if all copies are equal.

Legend: L MoE layers, E experts.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from scheduler.weights.versions import WeightDigests, WeightReport

_DIGEST_DIGITS = 32


def digest_of(digests: WeightDigests) -> str:
    """Return the digest of the version that has these check sums on all ranks together."""
    taken = hashlib.sha256(digests.plain.encode())
    taken.update(digests.experts_LE.astype("<u8").tobytes())
    return taken.hexdigest()[:_DIGEST_DIGITS]


def merge(reports: Iterable[WeightReport]) -> WeightDigests | str:
    """Join the check sums of ranks. Returns a description instead if copies of a weight differ."""
    merged: WeightDigests | None = None
    first = 0
    for report in reports:
        assert report.digests is not None, "a rank that has loaded weights has their check sums"
        plain, own_LE = report.digests
        if merged is None:
            merged, first = WeightDigests(plain, own_LE.copy()), report.rank
            continue
        if plain != merged.plain:
            return f"ranks {first} and {report.rank} have different weights outside the experts"
        both = (own_LE != 0) & (merged.experts_LE != 0)
        if differ := np.argwhere(both & (own_LE != merged.experts_LE)).tolist():
            layer, expert = differ[0]
            return f"rank {report.rank} has another copy of expert {expert} in MoE layer {layer} than an earlier rank"
        np.copyto(merged.experts_LE, own_LE, where=merged.experts_LE == 0)
    assert merged is not None, "some rank serves"
    return merged
