"""Models whose layers torch.compile compiles give transformers' logits, in few graphs that break nowhere."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import fx
from transformers import PreTrainedModel

from tests.support.families import VOCABULARY, make_model, write_checkpoint
from tests.support.gpu_path import build_interpreted, mixed_steps, run_steps
from tests.support.quantise import write_quantised
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.slow,
]
TOLERANCE = 1e-4
LENGTHS = (19, 8)
# Of each kind of layer: any number of rows, one row, and the first size and the first layer by themselves.
MOST_GRAPHS = {"qwen3_moe": 4, "gpt_oss": 5, "mixtral": 4, "deepseek_v3": 8}
WIDE = {"hidden_size": 128, "moe_intermediate_size": 128}


class Found(NamedTuple):
    """What a rank computed, and how it was compiled."""

    logits: list[np.ndarray]
    permuted_logits: list[np.ndarray]  # the control: every choice goes to another expert
    num_graphs: int
    graph_breaks: list[str]
    operators: set[str]


def answer(directory: Path, sequences: list[list[int]], compiler: str) -> Found:
    """Run sequences in mixed steps."""
    from torch._dynamo import register_backend, reset  # noqa: PLC0415 - dear to import
    from torch._dynamo.backends.registry import lookup_backend  # noqa: PLC0415
    from torch._dynamo.utils import counters  # noqa: PLC0415

    compile_graph = lookup_backend(compiler)
    graphs: list[fx.GraphModule] = []

    def counting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return compile_graph(graph, inputs)

    reset()
    counters.clear()
    name = f"counting_{directory.name}"  # a name is taken once in a process
    register_backend(counting, name=name)
    built = build_interpreted(directory, compiler=name)
    logits = run_steps(built, sequences, mixed_steps(LENGTHS))
    called = {
        str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    }
    num_graphs = len(graphs)
    layers: Any = built.model.layers
    for layer in layers:
        table_EC = layer._on_device._slot_EC
        table_EC.copy_(table_EC.roll(1, 0))
    permuted = run_steps(built, sequences, mixed_steps(LENGTHS))
    operators = {each for each in called if "wideep" in each}
    return Found(logits, permuted, num_graphs, list(counters["graph_break"]), operators)


def check(
    oracle: PreTrainedModel, directory: Path, interpreter: RankPool, compiler: str = "aot_eager"
) -> Found:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    found: Found = interpreter.run(answer, directory, sequences, compiler, timeout_s=500.0)[0]
    with torch.inference_mode():
        wanted = [oracle(torch.tensor([each])).logits[0].numpy() for each in sequences]
    for ours, wrong, theirs in zip(found.logits, found.permuted_logits, wanted, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
        assert np.abs(wrong - theirs).max() > 100 * TOLERANCE, "the control did not fail"
    assert not found.graph_breaks
    organs = {"wideep.write_layer", "wideep.attend", "wideep.experts"}
    assert organs <= found.operators
    return found


@pytest.mark.parametrize("family", list(MOST_GRAPHS))
def test_compiled_layers_give_transformers_logits(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    found = check(write_checkpoint(family, tmp_path), tmp_path, interpreter)
    assert 0 < found.num_graphs <= MOST_GRAPHS[family]


def test_more_layers_take_no_more_graphs(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = make_model("qwen3_moe", num_hidden_layers=10)  # dynamo's own limit is 8
    oracle.save_pretrained(tmp_path)
    assert check(oracle, tmp_path, interpreter).num_graphs <= MOST_GRAPHS["qwen3_moe"]


def test_fp8_layers_multiply_inside_compiled_ones(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = write_quantised("qwen3_moe", tmp_path, block=(128, 128), **WIDE)
    found = check(oracle, tmp_path, interpreter)
    assert "wideep.device_linear" in found.operators
    assert found.num_graphs <= MOST_GRAPHS["qwen3_moe"]


def test_inductors_code_gives_transformers_logits(interpreter: RankPool, tmp_path: Path) -> None:
    check(write_checkpoint("mixtral", tmp_path), tmp_path, interpreter, "inductor")
