"""A whole model with adapters on the GPU path, in Triton's interpreter: rows equal the merged model, and neighbours change nothing."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import read_adapter
from tests.moe.lora.test_adapted_model import EVERYWHERE, MODULES, Case, make_case, place_all
from tests.support.engines.serving import build
from tests.support.gpu.path import SETTINGS, Part, build_interpreted, run_steps
from tests.support.models.adapters import merged, write_adapter
from tests.support.models.families import SHALLOW, VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

TOLERANCE = 1e-4
LENGTHS = (7, 4)
# A prompt; the other one next to a decode; two decodes.
STEPS = [[Part(0, 0, 5)], [Part(0, 5, 6), Part(1, 0, 3)], [Part(0, 6, 7), Part(1, 3, 4)]]
# A router in float32; another one; biases and a gate in turn; latents and shared experts; three kinds of states; a sparse index.
FAMILIES = (
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next", "kimi_linear", "nemotron_h", "deepseek_v32",
)  # fmt: skip

INVARIANT = ("qwen3_moe", "deepseek_v3")  # families with --batch-invariant, for heads and for latents


class Found(NamedTuple):
    """Logits of two sequences, by the places of their adapters."""

    both: list[np.ndarray]  # at places 0 and 1
    first: list[np.ndarray]  # only the first has an adapter
    plain: list[np.ndarray]  # none has one
    unadapted: list[np.ndarray]  # of a model that takes none; empty: it did not run


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def answer(
    directory: Path,
    paths: Sequence[Path],
    settings: dict[str, Any],
    device: str = "interpreter",
    *,
    has_unadapted: bool = True,
) -> Found:
    make = build_interpreted if device == "interpreter" else partial(build, device=device, **SETTINGS)
    built = make(directory, enable_lora=True, max_loras=2, **settings)
    place_all(built, paths)
    both, first, plain = (
        run_steps(built, sequences(), STEPS, adapters=places) for places in ((0, 1), (0, -1), (-1, -1))
    )
    unadapted = run_steps(make(directory, **settings), sequences(), STEPS) if has_unadapted else []
    return Found(both, first, plain, unadapted)


def check(case: Case, found: Found) -> None:
    models = [case.model, *(merged(case.model, each) for each in case.adapters)]
    for index, prompt in enumerate(sequences()):
        with torch.inference_mode():
            base, adapted = (models[at](torch.tensor([prompt])).logits[0].numpy() for at in (0, index + 1))
        assert np.abs(found.both[index] - adapted).max() < TOLERANCE
        assert np.abs(found.plain[index] - base).max() < TOLERANCE
        assert np.abs(adapted - base).max() > 10 * TOLERANCE, "the adapter changes something"
        if found.unadapted:
            assert np.abs(found.plain[index] - found.unadapted[index]).max() < TOLERANCE
    assert np.array_equal(found.first[0], found.both[0]), "a neighbour's adapter changes a row"
    assert np.array_equal(found.first[1], found.plain[1]), "a row without an adapter has other bits"


@pytest.mark.slow  # interpreted kernels
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_mixes_adapters_and_plain_rows(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    """Models of the other families without adapters are in test_gpu_parity and in the parity of tests/benchmarks/gpu/test_whole_day.py."""
    case = make_case(family, tmp_path, of_model=SHALLOW.get(family))
    settings = {"batch_invariant": True} if family in INVARIANT else {}
    run = partial(answer, has_unadapted=family in INVARIANT)
    [found] = interpreter.run(run, case.directory, case.paths, settings)
    check(case, found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_mixes_adapters_and_plain_rows(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    check(case, answer(case.directory, case.paths, {"dtype": "float32", "batch_invariant": True}, "cuda"))


def refuse(directory: Path, path: Path) -> str:
    bank = build_interpreted(directory, enable_lora=True, max_loras=1).model.adapters
    assert bank is not None
    with pytest.raises(AdapterError) as caught:
        bank.load(path, read_adapter(path).digest, max_rank=64)
    return str(caught.value)


@pytest.mark.slow
def test_every_linear_layer_takes_adapters_and_strangers_are_named(
    interpreter: RankPool, tmp_path: Path
) -> None:
    assert set(MODULES["qwen3_moe"]) == set(EVERYWHERE)
    directory = tmp_path / "model"
    write_checkpoint("qwen3_moe", directory)
    latent = write_checkpoint("deepseek_v3", tmp_path / "latent")
    stranger = write_adapter(tmp_path / "stranger", latent, modules=("q_a_proj",), experts="").directory
    [message] = interpreter.run(refuse, directory, stranger)
    assert "this model has no model.layers.0.self_attn.q_a_proj" in message


def refuse_model(directory: Path, settings: dict[str, Any]) -> str:
    with pytest.raises(Exception) as caught:
        build_interpreted(directory, enable_lora=True, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("llama4", {}, "experts with scaled inputs"),
        ("qwen3_moe", {"enable_torch_compile": True, "compiler": "eager"}, "without --enable-torch-compile"),
    ],
)
def test_models_and_settings_without_adapters_on_gpus_are_named(
    interpreter: RankPool, tmp_path: Path, family: str, settings: dict[str, Any], says: str
) -> None:
    write_checkpoint(family, tmp_path / "model")
    [message] = interpreter.run(refuse_model, tmp_path / "model", settings)
    assert says in message and "--enable-lora" in message
