"""Modules rotate with the kernel if their file's function computes the same; their own file is left as it is."""

import importlib
from typing import NamedTuple

import pytest
import torch

from tests.support.families import make_model
from tests.support.ranks import RankPool


class Found(NamedTuple):
    """How many modules were exchanged, of how many layers, and how far the logits moved."""

    exchanged: int
    layers: int
    difference: float
    is_file_untouched: bool


def exchange(family: str) -> Found:
    from moe.adopt.adopt import Rows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.rotary import rotary  # noqa: PLC0415

    model = make_model(family)
    file = importlib.import_module(type(model).__module__)
    before = file.apply_rotary_pos_emb
    tokens = torch.randint(3, 200, (1, 3), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        wanted = model(tokens).logits
        exchanged = adopt(model.modules(), (rotary,), Rows(torch.float32, torch.device("cpu")))["rotary"]
        found = model(tokens).logits
    untouched = file.apply_rotary_pos_emb is before
    return Found(exchanged, len(model.model.layers), float((found - wanted).abs().max()), untouched)


@pytest.mark.parametrize(
    ("family", "is_exchanged"),
    [
        ("qwen3_moe", True),
        pytest.param("glm4_moe", True, marks=pytest.mark.slow),  # rotates half of each head
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),  # its angles are of half a head
    ],
)
def test_modules_that_rotate_as_the_kernel_does_use_it(
    family: str, is_exchanged: bool, interpreter: RankPool
) -> None:
    found: Found = interpreter.run(exchange, family)[0]
    assert found.exchanged == (found.layers if is_exchanged else 0)
    assert found.difference < 1e-5 and found.is_file_untouched
