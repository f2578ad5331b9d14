"""Adopt faster forms of a model's modules, where trying shows that they compute the same; for every device (D11).

What a layer is, is found by trying, not by its name: a candidate is built from a module's own tensors, run beside it on
seeded rows, and takes the module's place only where the results agree. What is not recognised keeps `transformers`' code.
To add a form (a recurrent mixer, a sparse index), write a function from a module to its candidates and give it to `adopt`.
Rejected: a list of classes, which would be late for each new family, and wrong once one changes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# What a module may raise that wants other shapes, or more arguments.
FOREIGN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class SampleRows(NamedTuple):
    """What modules are given: their type, and where they are."""

    dtype: torch.dtype
    device: torch.device

    def draw(self, *shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
        """Draw seeded rows; the same on every device."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (drawn * spread).to(self.device, self.dtype)


class Candidate(NamedTuple):
    """A faster form of what a module runs, to be tried."""

    own: Callable[..., Any]  # what it runs now
    ours: Callable[..., Any]
    arguments: Callable[[], tuple[Tensor, ...]]  # called for each: a form may write into them
    tolerance: float  # absolute and relative; 0: to the bit
    install: Callable[[], None]
    kind: Hashable = (
        None  # candidates of one kind agree or not together: the first is tried. None: a kind of its own
    )


Propose = Callable[
    [nn.Module, SampleRows], Iterator[Candidate]
]  # the likeliest first; nothing for a module of another kind


def adopt(modules: Iterable[nn.Module], proposals: Iterable[Propose], rows: SampleRows) -> Counter[str]:
    """Let modules run the first candidate that agrees with them; returns how many do, by the name of the proposal.

    Args:
        modules: their weights are where they serve.
        rows: as the modules are given them.
    """
    adopted: Counter[str] = Counter()
    verdicts: dict[Hashable, bool] = {}
    proposals = [*proposals]
    for module in modules:
        for propose in proposals:
            candidate = first_agreeing(propose(module, rows), verdicts)
            if candidate is not None:
                candidate.install()
                adopted[getattr(propose, "__name__", type(propose).__name__)] += 1
                break
    return adopted


def first_agreeing(
    candidates: Iterable[Candidate], verdicts: dict[Hashable, bool] | None = None
) -> Candidate | None:
    """Return the first candidate that gives what the module gives; `verdicts` by kind are kept for the next ones."""
    verdicts = {} if verdicts is None else verdicts
    for candidate in candidates:
        agrees = verdicts.get(candidate.kind) if candidate.kind is not None else None
        if agrees is None:
            agrees = verdicts[candidate.kind] = _agrees(candidate)
        if agrees:
            return candidate
    return None


@torch.no_grad()
def _agrees(candidate: Candidate) -> bool:
    try:
        wanted = tree_leaves(candidate.own(*candidate.arguments()))
    except FOREIGN_ERRORS:
        return False
    found = tree_leaves(candidate.ours(*candidate.arguments()))
    return len(found) == len(wanted) and all(map(_alike(candidate.tolerance), found, wanted))


def _alike(tolerance: float) -> Callable[[Any, Any], bool]:
    def alike(found: Any, wanted: Any) -> bool:
        if not isinstance(wanted, Tensor) or found.dtype != wanted.dtype or found.shape != wanted.shape:
            return False
        return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance)

    return alike
