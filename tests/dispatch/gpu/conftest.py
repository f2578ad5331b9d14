"""Two ranks whose kernels are interpreted."""

from collections.abc import Iterator

import pytest

from tests.support.interpreted import interpret
from tests.support.ranks import RankPool


@pytest.fixture(scope="package")
def interpreting_pair() -> Iterator[RankPool]:
    """Two ranks of their own: the interpreter must be chosen before anything in a process imports triton."""
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        yield pool
