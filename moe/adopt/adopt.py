"""Adopt faster forms of a model's modules if a trial shows the same results; for every device.

Layers are recognised by a trial, not by name. A candidate is built from a module's own tensors, runs next to it on
seeded rows, and replaces it only if the results agree. Modules without such a candidate keep `transformers`' code.
To add a form (a recurrent mixer, a sparse index), write a function from a module to its candidates and pass it to `adopt`.
Rejected: a list of classes, which would be late for each new family, and wrong once a class changes.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Errors of modules that take other shapes or more arguments.
FOREIGN_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
SPREADS = (1.0, 3.0, 30.0, 300.0)  # of rows in trials that must find clamps


class SampleRows(NamedTuple):
    """Type and device of the rows that modules take."""

    dtype: torch.dtype
    device: torch.device

    def draw(self, *shape: int, seed: int = 0, spread: float = 1.0) -> Tensor:
        """Draw seeded rows, with the same values on every device."""
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return (drawn * spread).to(self.device, self.dtype)


def draw_spread(rows: SampleRows, width: int) -> Tensor:
    """Draw small and large rows [1, len(SPREADS), width], so that clamps show."""
    drawn = rows.draw(1, len(SPREADS), width)
    return drawn * torch.tensor(SPREADS, device=rows.device, dtype=rows.dtype)[:, None]


def by_size(results: Iterable[Tensor]) -> list[Tensor]:
    """Divide rows by their largest value, so that one tolerance suits small and large rows. Return both, the sizes as logarithms."""
    found = []
    for each in results:
        size = each.float().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        found += [each.float() / size, size.log()]
    return found


class Candidate(NamedTuple):
    """A faster form of a module's code, to be tried."""

    own: Callable[..., Any]  # the module's code
    ours: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]  # called for each form, which may write into them
    tolerance: float  # absolute and relative; 0: bit-identical
    install: Callable[[], None]
    # Candidates of one kind agree or disagree together, so only the first is tried. None tries each.
    kind: Hashable = None


# Yields the likeliest candidate first; none for a module of another kind.
Propose = Callable[[nn.Module, SampleRows], Iterator[Candidate]]


def adopt(modules: Iterable[nn.Module], proposals: Iterable[Propose], rows: SampleRows) -> Counter[str]:
    """Let each module run the first candidate that agrees with it. Return counts by the name of the proposal.

    Args:
        modules: Modules with their weights on the device.
        rows: Type and device of the rows that they take.
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
    """Return the first candidate that agrees with its module. Results by kind are stored in `verdicts` for later calls."""
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
