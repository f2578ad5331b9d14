"""Shared experts beside dispatch: found by what a model does, left alone where that would change an answer, same bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe.families import build_on_meta, experts_modules
from moe.rehearsal import rehearse
from moe.shared_experts import SharedExpert, meanwhile_of
from moe.shared_rehearsal import Shared, Watch
from tests.conftest import PoolOf
from tests.support.families import FAMILIES, make_config, write_checkpoint
from tests.support.family_sweep import prompts, tiny_config, write_tiny
from tests.support.serving import build, own_share, teacher_forced

DIM, ROWS = 8, 6
FIRST, AFTER, NONE = [True], [False], list[bool]()
FOUND = {  # whether the model asks its shared expert before its experts
    "qwen2_moe": FIRST,
    "ernie4_5_moe": FIRST,
    "afmoe": FIRST,
    "hunyuan_v1_moe": FIRST,
    "laguna": FIRST,
    "deepseek_v2": AFTER,
    "deepseek_v3": AFTER,
    "glm4_moe": AFTER,
    "dots1": AFTER,
    "granitemoeshared": AFTER,
    "cohere2_moe": AFTER,
    "solar_open": AFTER,
    "mixtral": NONE,
    "qwen3_moe": NONE,
    "gpt_oss": NONE,
    "granitemoe": NONE,
}


slow = pytest.mark.slow
FAST = ("qwen2_moe", "hunyuan_v1_moe", "deepseek_v3", "granitemoeshared", "mixtral")


@pytest.mark.parametrize(
    "family", [family if family in FAST else pytest.param(family, marks=slow) for family in FOUND]
)
def test_a_familys_shared_experts_are_found_by_what_it_does(family: str) -> None:
    config = make_config(family) if family in FAMILIES else tiny_config(family)
    model = build_on_meta(config)
    found = rehearse(model, experts_modules(model)).shared
    assert len(found) > 0
    for experts, shared in found.items():
        assert [each.comes_first for each in shared] == FOUND[family], experts
        assert all("shared" in each.name for each in shared), shared


class Experts(nn.Module):
    def forward(self, rows: Tensor, _ids: Tensor, _weights: Tensor) -> Tensor:
        return rows * 2


class Nested(nn.Module):
    """A shared expert of two steps, the first of which would do by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.outer = nn.Linear(DIM, DIM)

    def forward(self, rows: Tensor) -> Tensor:
        return self.outer(self.inner(rows).relu())


class Scaled(nn.Module):
    def forward(self, rows: Tensor, scale: float) -> Tensor:
        return rows * scale


class Block(nn.Module):
    """A MoE block whose forward is a function of itself and its rows."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = Experts()
        self.shared = Nested()
        self.scaled, self.narrow, self.norm = Scaled(), nn.Linear(DIM, 1), nn.LayerNorm(DIM)
        self._form = form

    def route(self, rows: Tensor) -> Tensor:
        weights = self.gate(rows)
        return self.experts(rows, weights.argmax(-1), weights)

    def forward(self, rows: Tensor) -> Tensor:
        return self._form(self, rows)


def asked_after(block: Block, rows: Tensor) -> Tensor:
    return block.route(rows.view(-1, DIM)).view(rows.shape) + block.shared(rows)


def asked_first(block: Block, rows: Tensor) -> Tensor:
    answer = block.shared(rows)
    return answer.view(-1, DIM) + block.route(rows.view(-1, DIM))


def answer_is_read_before(block: Block, rows: Tensor) -> Tensor:
    answer = block.shared(rows) * 2
    return answer + block.route(rows)


def answer_is_routed_by(block: Block, rows: Tensor) -> Tensor:
    answer = block.shared(rows)
    return block.experts(rows, answer.argmax(-1), answer)


def rows_change_before_it_is_asked(block: Block, rows: Tensor) -> Tensor:
    out = block.route(rows)
    rows.view(-1).add_(1)
    return out + block.shared(rows)


def rows_change_after_it_was_asked(block: Block, rows: Tensor) -> Tensor:
    answer = block.shared(rows)
    rows.mul_(2)
    return answer + block.route(rows)


def other_rows(block: Block, rows: Tensor) -> Tensor:
    return block.route(block.norm(rows)) + block.shared(rows)


def some_rows(block: Block, rows: Tensor) -> Tensor:
    return block.route(rows)[..., :2, :] + block.shared(rows[..., :2, :])


def rows_and_a_weight(block: Block, rows: Tensor) -> Tensor:
    return block.route(rows) + block.scaled(rows, 0.5)


def asked_twice(block: Block, rows: Tensor) -> Tensor:
    return block.shared(rows) + block.route(rows) + block.shared(rows)


def answers_of_another_width(block: Block, rows: Tensor) -> Tensor:
    return block.route(rows) * block.narrow(rows)


def answers_the_rows_themselves(block: Block, rows: Tensor) -> Tensor:
    block.shared.forward = lambda rows: rows  # type: ignore[method-assign]
    return block.shared(rows) + block.route(rows)


ALONE = (
    answer_is_read_before,
    answer_is_routed_by,
    rows_change_before_it_is_asked,
    rows_change_after_it_was_asked,
    other_rows,
    some_rows,
    rows_and_a_weight,
    asked_twice,
    answers_of_another_width,
    answers_the_rows_themselves,
)


def watch(form: Callable[..., Tensor]) -> list[Shared]:
    """What is found in a block, run on meta as a layer of a model is."""
    net = nn.Sequential(nn.Linear(DIM, DIM), Block(form)).to("meta")
    watched = Watch(net, {"1.experts": net.get_submodule("1.experts")})
    with torch.no_grad(), watched.running():
        net(torch.empty(1, ROWS, DIM, device="meta"))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    return watched.found()["1.experts"]


@pytest.mark.parametrize("form", ALONE, ids=[form.__name__ for form in ALONE])
def test_what_would_change_an_answer_is_left_alone(form: Callable[..., Tensor]) -> None:
    assert watch(form) == []


def test_the_outermost_module_is_found_with_its_order_and_shape() -> None:
    assert watch(asked_after) == [Shared("1.shared", False, (1, -1, DIM))]
    assert watch(asked_first) == [Shared("1.shared", True, (1, -1, DIM))]


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        return rows * 2


def test_an_answer_that_was_asked_first_is_filled_in_beside_the_rows() -> None:
    module, rows = Doubled(), torch.arange(6.0).view(1, 2, 3)
    shared = SharedExpert(module, Shared("m", True, (1, -1, 3)))
    answer = module(rows)
    assert module.calls == 0
    meanwhile_of([shared], rows.view(2, 3))()
    assert module.calls == 1 and torch.equal(answer, rows * 2)
    meanwhile_of([shared], rows.view(2, 3))()
    assert module.calls == 1, "nothing was asked since"


def test_an_answer_that_is_asked_later_is_handed_out_once() -> None:
    module, rows = Doubled(), torch.arange(6.0).view(1, 2, 3)
    shared = SharedExpert(module, Shared("m", False, (1, -1, 3)))
    meanwhile_of([shared], rows.view(2, 3))()
    assert module.calls == 1 and torch.equal(module(rows), rows * 2) and module.calls == 1
    assert torch.equal(module(rows), rows * 2) and module.calls == 2, "it is there for one asking"


def test_two_halves_of_a_step_get_their_own_and_other_rows_are_computed_when_asked() -> None:
    module, halves = Doubled(), [torch.full((1, 2, 3), float(index)) for index in range(4)]
    shared = SharedExpert(module, Shared("m", False, (1, -1, 3)))
    for rows in halves[:2]:
        shared.compute(rows.view(2, 3))
    for rows in (halves[1], halves[0], halves[2]):
        assert torch.equal(module(rows), rows * 2)
    assert module.calls == 3
    for rows in halves:  # broken off, again and again: no more than two are kept
        shared.compute(rows.view(2, 3))
    assert len(shared._ready) == 2
    shared.close()
    assert torch.equal(module(halves[3]), halves[3] * 2) and module.calls == 8


def with_and_without(directory: Path, sequences: list[list[int]], backend: str) -> tuple[bool, int]:
    """Run this rank's sequences with shared experts beside dispatch, then where the block asks: the same bits?"""
    built = build(directory, max_model_len=64, all2all_backend=backend)
    beside = teacher_forced(built, own_share(sequences))
    shared = [each for layer in built.model.layers for each in layer.shared]
    for layer in built.model.layers:
        layer.shared = ()
    for each in shared:
        each.close()
    alone = teacher_forced(built, own_share(sequences))
    return all(map(np.array_equal, beside, alone)), len(shared)


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen2_moe", "gloo"),
        ("deepseek_v3", "shm"),
        *(
            pytest.param(family, backend, marks=slow)
            for family, backend in [
                ("qwen2_moe", "shm"),
                ("deepseek_v3", "gloo"),
                ("deepseek_v2", "shm"),
                ("glm4_moe", "gloo"),
                ("dots1", "shm"),
                ("ernie4_5_moe", "gloo"),
                ("afmoe", "shm"),
                ("hunyuan_v1_moe", "gloo"),
                ("granitemoeshared", "shm"),
                ("cohere2_moe", "gloo"),
            ]
        ),
    ],
)
def test_two_ranks_compute_shared_experts_beside_their_rows_with_the_same_bits(
    family: str, backend: str, pool_of: PoolOf, tmp_path: Path
) -> None:
    write: Any = write_checkpoint if family in FAMILIES else write_tiny
    write(family, tmp_path)
    sequences = prompts(21, 3, 17, 30, 2)
    for is_same, num_shared in pool_of(2).run(with_and_without, tmp_path, sequences, backend):
        assert is_same
        assert num_shared > 0


def test_one_rank_leaves_the_blocks_as_they_are(tmp_path: Path) -> None:
    write_checkpoint("qwen2_moe", tmp_path)
    assert with_and_without(tmp_path, prompts(9), "auto") == (True, 0)
