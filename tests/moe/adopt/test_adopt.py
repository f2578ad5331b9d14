"""What is proposed for a module takes its place only where it gives what the module gives."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from moe.adopt.adopt import Candidate, Rows, adopt

ROWS = Rows(torch.float32, torch.device("cpu"))


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def candidate(module: nn.Module, ours: Callable[[Tensor], Tensor], tolerance: float = 0.0) -> Candidate:
    return Candidate(
        own=module.forward,
        ours=ours,
        arguments=lambda: (ROWS.draw(3, 4),),
        tolerance=tolerance,
        install=partial(setattr, module, "forward", ours),
    )


def is_adopted(ours: Callable[[Tensor], Tensor], tolerance: float = 0.0) -> bool:
    module = Doubling()

    def proposal(each: nn.Module, _rows: Rows) -> Iterator[Candidate]:
        yield candidate(each, ours, tolerance)

    count = adopt([module], (proposal,), ROWS)["proposal"]
    assert (module.forward is ours) == bool(count)
    return bool(count)


@pytest.mark.parametrize(
    ("ours", "tolerance", "agrees"),
    [
        (lambda x: x + x, 0.0, True),
        (lambda x: x * 2.0001, 0.0, False),
        (lambda x: x * 2.0001, 1e-3, True),
        (lambda x: (x + x).double(), 1e-3, False),  # another type
        (lambda x: (x + x)[:2], 1e-3, False),  # another shape
        (lambda x: (x + x, x), 1e-3, False),  # one result more
        (lambda x: x.mul_(2), 0.0, True),  # written in place: each side has rows of its own
    ],
)
def test_a_candidate_takes_a_modules_place_where_it_gives_the_same(
    ours: Callable[[Tensor], Tensor], tolerance: float, agrees: bool
) -> None:
    assert is_adopted(ours, tolerance) == agrees


def test_a_module_that_wants_other_arguments_keeps_its_own() -> None:
    class Wanting(Doubling):
        def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
            return x + more

    module = Wanting()
    assert not adopt([module], (lambda each, _rows: iter([candidate(each, torch.sin)]),), ROWS)
    assert "forward" not in vars(module)


def test_the_first_candidate_that_agrees_is_taken_and_a_kind_is_tried_once() -> None:
    tried: list[str] = []

    def ours(name: str, factor: float, x: Tensor) -> Tensor:
        tried.append(name)
        return x * factor

    def proposals(module: nn.Module, _rows: Rows) -> Iterator[Candidate]:
        for name, factor in (("wrong", 3.0), ("right", 2.0), ("late", 2.0)):
            yield candidate(module, partial(ours, name, factor))._replace(kind=name)

    assert adopt([Doubling(), Doubling()], (proposals,), ROWS)["proposals"] == 2
    assert tried == ["wrong", "right"]
