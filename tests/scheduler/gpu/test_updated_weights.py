"""A rank on the GPU path changes its base weights: captured steps then compute what a rank computes that starts with them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from moe.overwrite import OtherStructureError, Overwrite
from scheduler.assembly import Assembled
from scheduler.policy.request import Request
from scheduler.step.graphs import StepGraphs
from scheduler.step.runner import Forward
from scheduler.weights.versions import WeightState, WeightVersion
from tests.scheduler.weights.test_versions_served import Run, requests
from tests.support.engines.serving import build, serve
from tests.support.engines.versions import serve_version, stage, version
from tests.support.gpu.path import SETTINGS, Part, build_interpreted, run_steps
from tests.support.gpu.recorded import FakeGraphs
from tests.support.models.families import SHALLOW, VOCABULARY, write_checkpoint
from tests.support.models.quantise import write_quantised
from tests.support.ranks import RankPool

SIZES = (24,)
LENGTHS = (18, 3)
# A step with prompts, one of them longer than what a sparse layer reads, and a decode.
STEPS = [[Part(0, 0, 17), Part(1, 0, 3)], [Part(0, 17, 18)]]
INVARIANT: dict[str, Any] = {"batch_invariant": True}
# Recurrent, latent and sparse layers, biases and sinks, a router in float32, norms with 1 added, experts without a gate.
# Plain qwen3_moe is updated below.
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    *((family, {}) for family in (
        "qwen3_next", "deepseek_v32", "gpt_oss", "nemotron_h", "kimi_linear", "gemma4", "minimax_m2", "minimax", "lfm2_moe",
        "llama4", "glm5_next", "jamba", "ernie4_5_vl_moe",
    )),
    *((family, INVARIANT) for family in ("deepseek_v3", "glm4_moe")),
    ("mimo_v2_flash", {"kv_cache_dtype": "int8"}),
    ("qwen3_moe", {"enable_lora": True, "max_loras": 1}),
)  # fmt: skip
QUANTISED: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp4": ("gpt_oss", {}),
    "fp8": ("qwen3_moe", {"block": (128, 128), "hidden_size": 128, "moe_intermediate_size": 128}),
}


Make = Callable[..., Assembled]


class Logits(NamedTuple):
    """Logits of one rank: with its first weights, after an update, and of another rank that starts with the new weights."""

    before: np.ndarray  # of the first step
    after: list[np.ndarray]
    fresh: list[np.ndarray]
    states: list[WeightState]
    num_replays: int  # after the update
    num_moved: int  # weights that have left their addresses


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def logits(built: Assembled, forward: Forward) -> list[np.ndarray]:
    """Return the logits of each part's last token, by sequence."""
    return run_steps(built, texts(), STEPS, forward=forward, only_last=True)


def update(directory: Path, new: WeightVersion, other: Path, settings: dict[str, Any]) -> Logits:
    """Replay the same steps before and after an update, and run them on a rank that starts with the new weights."""
    built, other_built = (build_interpreted(each, **settings) for each in (directory, other))
    for each in (built, other_built):
        each.runner.step.fix_prompts(SIZES)  # type: ignore[attr-defined]
    graphs = StepGraphs(built.model.forward, built.runner.step, built.runner.cache)  # type: ignore[arg-type]
    if not settings.get("enable_torch_compile"):  # compiled code cannot be recorded
        graphs.capture((1,), FakeGraphs(), prompt_sizes=SIZES)
    before, _ = run_steps(built, texts(), STEPS[:1], forward=graphs, only_last=True)
    num_replays = graphs.num_replays
    places = addresses(built)
    reports: list[Any] = []
    weights = built.engine.weights
    weights.on_report = reports.append
    weights.order(stage(new))
    assert weights._worker is not None
    weights._worker.join()
    weights.order(serve_version(new))
    weights.settle(new.number)
    after = logits(built, graphs)
    num_moved = len(places - addresses(built))
    built.engine.close()
    states = [each.state for each in reports]
    fresh = logits(other_built, other_built.model.forward)
    return Logits(before, after, fresh, states, graphs.num_replays - num_replays, num_moved)


def addresses(built: Assembled) -> set[int]:
    """Return the addresses of all tensors of the model. Its pairs with itself are all tensors but those of experts."""
    plain = [ours for ours, _ in Overwrite(built.model.net, built.model.net).pairs]
    sides = [side for layer in built.model.layers for side in (layer.up, layer.down)]
    experts = [tensor for side in sides for tensor in side.store.parts.values()]
    assert len(plain) > 20
    return {tensor.data_ptr() for tensor in (*plain, *experts)}


def replaced(folder: Path, settings: dict[str, Any], interpreter: RankPool) -> Logits:
    """Replace the weights of folder `a` by those of folder `b`, and check the logits."""
    new = version(1, folder / "b")
    [found] = interpreter.run(update, folder / "a", new, folder / "b", settings, timeout_s=400.0)
    assert isinstance(found, Logits)
    assert found.states == [WeightState.STAGED, WeightState.SERVING]
    assert found.num_moved == 0, "captured steps would read the old weights"
    for after, fresh in zip(found.after, found.fresh, strict=True):
        assert np.array_equal(after, fresh)
    assert not np.array_equal(found.before[0], found.after[0][0])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), CASES)
def test_logits_after_an_update_have_the_bits_of_a_rank_that_starts_with_the_weights(
    family: str, settings: dict[str, Any], interpreter: RankPool, tmp_path: Path
) -> None:
    for seed, folder in enumerate("ab"):
        write_checkpoint(family, tmp_path / folder, seed=seed, is_shallow=family in SHALLOW)
    assert replaced(tmp_path, settings, interpreter).num_replays == len(STEPS)


@pytest.mark.slow
def test_compiled_layers_read_the_new_weights(interpreter: RankPool, tmp_path: Path) -> None:
    for seed, folder in enumerate("ab"):
        write_checkpoint("qwen3_moe", tmp_path / folder, seed=seed, is_shallow=True)
    replaced(tmp_path, {"enable_torch_compile": True, "compiler": "aot_eager"}, interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("form", QUANTISED)
def test_quantised_weights_are_replaced_by_quantised_ones(
    form: str, interpreter: RankPool, tmp_path: Path
) -> None:
    family, settings = QUANTISED[form]
    for seed, folder in enumerate("ab"):
        write_quantised(family, tmp_path / folder, seed=seed, **settings)
    replaced(tmp_path, {}, interpreter)


def test_models_with_other_structures_are_not_mixed(tmp_path: Path) -> None:
    net, other = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    assert [(a.shape, b.shape) for a, b in Overwrite(net, other).pairs] == [((4,), (4,)), ((4, 3), (4, 3))]
    for wrong, reason in (
        (torch.nn.Linear(3, 4, bias=False), "model.bias is a Parameter or a NoneType"),
        (torch.nn.Linear(3, 5), r"model.\w+ is torch.float32 \[4.*, and torch.float32 \[5"),
        (torch.nn.Linear(3, 4).bfloat16(), "torch.bfloat16"),
        (torch.nn.Identity(), "model is a Linear or a Identity"),
    ):
        with pytest.raises(OtherStructureError, match=reason):
            Overwrite(net, wrong)
    net.scale = other.scale = torch.ones(1).expand(2)
    with pytest.raises(OtherStructureError, match=r"model\.scale has several elements at one address"):
        Overwrite(net, other)
    del net.scale
    with pytest.raises(OtherStructureError, match=r"model has other parts: \['scale'\]"):
        Overwrite(net, other)


def serve_across(
    directory: Path, new: WeightVersion, other: Path, how: dict[str, Any], make: Make = build_interpreted
) -> tuple[Any, ...]:
    """Let requests be open during an update. Return their tokens before it, all their tokens, and those of a fresh rank."""
    settings = {**SETTINGS, "max_model_len": 96, **how}
    run = Run(directory, make=make, **settings)
    wanted = requests("open", count=3, max_tokens=12)

    def serve_soon(_output: object) -> None:
        if len(run.tokens.get("open 1", ())) >= 4 and run.built.engine.weights.newest is None:
            run.built.engine.weights.order(serve_version(new))

    run.on_output = serve_soon
    run.through(
        run.order(stage(new)), run.submit(wanted), run.submit(requests("after", count=2, max_tokens=6))
    )
    [before] = run.installed_after
    again = [
        Request(**{**vars(each), "replayed_ids": tuple(before[each.request_id])})
        for each in wanted
        if len(before[each.request_id]) < 12
    ]
    fresh = make(other, **settings)
    served = serve(fresh, again, requests("after", count=2, max_tokens=6))
    return before, run.tokens, served.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"overlaps_steps": True}], ids=["", "overlapped"])
def test_open_requests_continue_with_the_new_weights(
    how: dict[str, Any], interpreter: RankPool, tmp_path: Path
) -> None:
    write_checkpoint("qwen3_moe", tmp_path / "a", is_shallow=True)
    write_checkpoint("qwen3_moe", tmp_path / "b", is_shallow=True, seed=1)
    new = version(1, tmp_path / "b")
    [found] = interpreter.run(serve_across, tmp_path / "a", new, tmp_path / "b", how, timeout_s=600.0)
    check_tokens(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss"])
def test_open_requests_continue_on_a_gpu(family: str, tmp_path: Path) -> None:
    for seed, folder in enumerate("ab"):
        write_checkpoint(family, tmp_path / folder, seed=seed, is_shallow=True)
    new, on_gpu = version(1, tmp_path / "b"), partial(build, device="cuda")
    check_tokens(*serve_across(tmp_path / "a", new, tmp_path / "b", {"batch_invariant": True}, make=on_gpu))


def check_tokens(
    before: dict[str, list[int]], tokens: dict[str, list[int]], fresh: dict[str, list[int]]
) -> None:
    assert len(before["open 1"]) >= 4 and len(before["open 1"]) < 12
    assert tokens == {key: before.get(key, []) + fresh.get(key, []) for key in tokens}
