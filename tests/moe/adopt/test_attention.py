"""Attention modules that get the fused launch: those that compute what it computes, found by a trial of each module."""

import inspect
import textwrap
from typing import Any

import pytest
import torch

from attention.transformers_names import CACHE
from tests.support.gpu.interpreted import needs_triton
from tests.support.models.families import make_model
from tests.support.ranks import RankPool

pytestmark = needs_triton


def adopted(model: Any) -> int:
    """Return how many attention modules of a model get the launch."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.attention import attention  # noqa: PLC0415
    from moe.adopt.norms import Norms  # noqa: PLC0415
    from moe.gpu.norm import add_rms_norm, rms_norm  # noqa: PLC0415

    rows = SampleRows(torch.float32, torch.device("cpu"))
    before = model.config._attn_implementation
    adopt(model.modules(), (Norms(rms_norm, add_rms_norm),), rows)
    count = adopt(model.modules(), (attention,), rows)["attention"]
    assert model.config._attn_implementation == before
    return count


def of_family(family: str) -> tuple[int, int]:
    model = make_model(family)
    return adopted(model), len(model.model.layers)


@pytest.mark.parametrize(
    ("family", "is_adopted"),
    [
        ("qwen3_moe", True),  # norms of heads
        ("gpt_oss", True),  # biases, sinks, angles of half a head
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),  # latents
        pytest.param("glm4_moe", True, marks=pytest.mark.slow),  # rotates half of each head
        pytest.param("ernie4_5_moe", True, marks=pytest.mark.slow),  # neighbours are pairs
        pytest.param("olmoe", False, marks=pytest.mark.slow),  # norms all heads together
        pytest.param("minimax_m2", False, marks=pytest.mark.slow),  # the same
        pytest.param("qwen3_next", False, marks=pytest.mark.slow),  # gates the result
    ],
)
def test_all_layers_of_a_family_get_the_launch_or_none(
    family: str, is_adopted: bool, interpreter: RankPool
) -> None:
    count, layers = interpreter.run(of_family, family)[0]
    assert count == (layers if is_adopted else 0)


# Changes of the forward that the launch does not make.
CHANGES = {
    "gated": ("self.o_proj(attn_output)", "self.o_proj(attn_output * attn_output.sigmoid())"),
    "scaled a little more": ("scaling=self.scaling", "scaling=self.scaling * 1.001"),
    "scaled at far positions": (
        "cos, sin = position_embeddings",
        "cos, sin = position_embeddings; query_states = query_states * "
        "(1 + (kwargs['position_ids'] > 8192).float())[:, None, :, None]",
    ),
    "clamped if large": ("self.v_proj(hidden_states)", "self.v_proj(hidden_states).clamp(-8, 8)"),
    "normed after the rotation": ("self.q_norm(self.q_proj(hidden_states).view(hidden_shape))", "self.q_proj(hidden_states).view(hidden_shape)"),
    "without a cache": (f"if {CACHE} is not None", "if False"),
    "with another result": ("return attn_output, attn_weights", "return attn_output, attn_weights, None"),
    "with sinks": ("scaling=self.scaling,", "scaling=self.scaling, s_aux=self.q_norm.weight,"),
}  # fmt: skip


def of_changed(change: tuple[str, str]) -> int:
    """Return how many modules get the launch after a change of their class' forward."""
    model = make_model("qwen3_moe", num_hidden_layers=1)
    kind: Any = type(model.model.layers[0].self_attn)
    file = inspect.getmodule(kind)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward)))
    old, new = change
    assert old in source, "transformers' forward has changed"
    names: dict[str, Any] = {}
    exec(source.replace(old, new), vars(file), names)
    changed = type("Changed", (kind,), {"forward": names["forward"]})
    model.model.layers[0].self_attn.__class__ = changed
    return adopted(model)


def test_the_changed_class_itself_gets_the_launch(interpreter: RankPool) -> None:
    """The control: the same code, unchanged."""
    assert interpreter.run(of_changed, ("self.scaling", "self.scaling"))[0] == 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_does_more_keeps_its_own_code(name: str, interpreter: RankPool) -> None:
    assert interpreter.run(of_changed, CHANGES[name])[0] == 0
