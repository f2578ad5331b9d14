"""The whole GPU path in Triton's interpreter returns transformers' own logits: prompts in chunks, decodes, both together;
also with layers compiled by torch.compile, in few graphs without breaks."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import fx
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.moe.load.test_quantising import quantised_oracle
from tests.support.engines.serving import build, request, serve
from tests.support.gpu.path import SETTINGS, Part, build_interpreted, mixed_steps, run_steps
from tests.support.models.families import SHALLOW, VOCABULARY, make_model, write_checkpoint
from tests.support.models.published import write_published
from tests.support.models.quantise import write_quantised
from tests.support.ranks import RankPool

TOLERANCE = 1e-4
LENGTHS = (19, 8)  # of the sequences; the first crosses a block's end while it decodes
# Kinds of states; indexes that leave tokens out, layers that share an index, sinks. Below, and in test_adapted_path, test_gpu_images
# and the day's parity (tests/benchmarks/gpu/test_whole_day.py) are mixtral, gpt_oss, deepseek_v3, deepseek_v32, llama4 and others.
FAMILIES = (
    "qwen3_moe",
    "kimi_linear",
    "nemotron_h",
    "jamba",
    "lfm2_moe",
    "minimax",
    "glm_moe_dsa",
    "hy_v4",
    "glm5_next",
    "gemma4",
    "muse_spark",
)

WIDE: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
# Second scales, zeros, two formats in one model.
AS_PUBLISHED = ("compressed-tensors NVFP4", "AWQ", "compressed-tensors, int4 experts and FP8")


class Found(NamedTuple):
    """Results of a rank, and statistics of the compilation if its layers were compiled."""

    logits: list[np.ndarray]
    permuted_logits: np.ndarray  # the control: of the last sequence, if every choice uses another expert
    num_counted: int  # choices counted in the first run
    num_graphs: int = 0
    graph_breaks: tuple[str, ...] = ()
    operators: frozenset[str] = frozenset()  # our own, in the graphs


def answer(directory: Path, sequences: list[list[int]], **settings: Any) -> Found:
    """Run sequences in mixed steps, then the last one in one step with wrong routing."""
    built = build_interpreted(directory, **settings)
    logits = run_steps(built, sequences, mixed_steps(LENGTHS))
    counted = int(built.model.load_counts.table[..., : built.model.skeleton.num_experts].sum())
    layers: Any = built.model.layers
    for layer in layers:
        table_EC = layer._on_device._slot_EC
        table_EC.copy_(table_EC.roll(1, 0))
    (permuted,) = run_steps(built, sequences[-1:], [[Part(0, 0, LENGTHS[-1])]])
    return Found(logits, permuted, counted)


def answer_compiled(directory: Path, sequences: list[list[int]], compiler: str) -> Found:
    """Run sequences in mixed steps, with layers compiled by torch.compile."""
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
    name = f"counting_{directory.name}"  # a name can be used once per process
    register_backend(counting, name=name)
    found = answer(directory, sequences, enable_torch_compile=True, compiler=name)
    called = (
        str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"
    )
    return found._replace(
        num_graphs=len(graphs),
        graph_breaks=tuple(counters["graph_break"]),
        operators=frozenset(each for each in called if "wideep" in each),
    )


def check_oracle(
    oracle: PreTrainedModel,
    directory: Path,
    interpreter: RankPool,
    compiler: str | None = None,
    **settings: Any,
) -> Found:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    run = partial(answer_compiled, compiler=compiler) if compiler else partial(answer, **settings)
    found: Found = interpreter.run(run, directory, sequences, timeout_s=500.0)[0]
    with torch.inference_mode():
        wanted = [oracle(torch.tensor([each])).logits[0].numpy() for each in sequences]
    for ours, theirs in zip(found.logits, wanted, strict=True):
        assert np.abs(ours - theirs).max() < TOLERANCE
    assert np.abs(found.permuted_logits - wanted[-1]).max() > 100 * TOLERANCE, "the control did not fail"
    layers = sum("down_proj" in dict(module.named_parameters(recurse=False)) for module in oracle.modules())
    assert (
        found.num_counted
        == sum(LENGTHS) * layers * oracle.config.get_text_config(decoder=True).num_experts_per_tok
    )
    if compiler:
        assert not found.graph_breaks
        assert {"wideep.write_layer", "wideep.attend", "wideep.experts"} <= found.operators
    return found


def answer_alone(directory: Path, sequences: list[list[int]], **settings: Any) -> list[np.ndarray]:
    """Run sequences in mixed steps."""
    return run_steps(build_interpreted(directory, **settings), sequences, mixed_steps(LENGTHS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [("qwen3_moe", "fp8"), ("gpt_oss", "int8"), ("deepseek_v3", "fp8"), ("deepseek_v3", "int8")],
)
def test_a_cache_in_8_bits_gives_the_logits_of_a_cpu_s(
    family: str, kv_cache_dtype: str, interpreter: RankPool, tmp_path: Path
) -> None:
    """Not to the bit: a last digit decides how a number is rounded. A cache that is not rounded is much further away."""
    write_checkpoint(family, tmp_path, is_shallow=True)
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    found = interpreter.run(
        partial(answer_alone, kv_cache_dtype=kv_cache_dtype), tmp_path, sequences, timeout_s=500.0
    )[0]
    wanted, plain = (
        run_steps(build(tmp_path, **{**SETTINGS, **settings}), sequences, mixed_steps(LENGTHS))
        for settings in ({"kv_cache_dtype": kv_cache_dtype}, {})
    )
    for ours, coded, exact in zip(found, wanted, plain, strict=True):
        assert np.abs(ours - coded).mean() < 0.2 * np.abs(exact - coded).mean()
        assert np.abs(ours - exact).mean() > 0.5 * np.abs(exact - coded).mean()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_in_chunks_and_decodes_beside_them_give_transformers_logits(
    family: str, interpreter: RankPool, tmp_path: Path
) -> None:
    check_oracle(write_checkpoint(family, tmp_path, is_shallow=family in SHALLOW), tmp_path, interpreter)


@pytest.mark.slow
def test_each_sequence_has_the_rotary_embeddings_of_its_own_length(
    interpreter: RankPool, tmp_path: Path
) -> None:
    """One of the two is longer than the limit."""
    parameters = {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 12,
        "short_factor": [1.0 + index / 10 for index in range(8)], "long_factor": [2.0 + index / 2 for index in range(8)],
    }  # fmt: skip
    oracle = make_model(
        "mixtral", num_hidden_layers=2, max_position_embeddings=128, rope_parameters=parameters
    )
    oracle.save_pretrained(tmp_path)
    check_oracle(oracle, tmp_path, interpreter)


@pytest.mark.slow
def test_mxfp4_experts_give_the_logits_of_what_they_stand_for(interpreter: RankPool, tmp_path: Path) -> None:
    check_oracle(write_quantised("gpt_oss", tmp_path, **SHALLOW["gpt_oss"]), tmp_path, interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_published_formats_give_the_logits_of_what_they_stand_for(
    name: str, interpreter: RankPool, tmp_path: Path
) -> None:
    directory = tmp_path / "checkpoint"
    meant = write_published(name, directory, **WIDE, head_dim=64)
    oracle = AutoModelForCausalLM.from_pretrained(meant, attn_implementation="eager", dtype=torch.float32)
    oracle.set_experts_implementation("eager")
    check_oracle(oracle.eval(), directory, interpreter)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_weights_quantised_on_load_give_the_logits_of_what_they_stand_for(
    form: str, interpreter: RankPool, tmp_path: Path
) -> None:
    """Rows are not quantised here, unlike on a CPU."""
    write_checkpoint("qwen3_moe", tmp_path, is_shallow=True)
    oracle, _ = quantised_oracle(tmp_path, form)
    check_oracle(oracle, tmp_path, interpreter, quantization=form)


# For each kind of layer: any number of rows, one row, and the first size and the first layer separately.
MOST_GRAPHS = {"qwen3_moe": 4, "gpt_oss": 5, "mixtral": 4, "deepseek_v3": 8}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_compiled_layers_give_transformers_logits(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    oracle = write_checkpoint(family, tmp_path, is_shallow=True)
    found = check_oracle(oracle, tmp_path, interpreter, "aot_eager")
    assert 0 < found.num_graphs <= MOST_GRAPHS[family]


@pytest.mark.slow
def test_more_layers_take_no_more_graphs(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = make_model("qwen3_moe", num_hidden_layers=9)  # dynamo's own limit is 8
    oracle.save_pretrained(tmp_path)
    found = check_oracle(oracle, tmp_path, interpreter, "aot_eager")
    assert 0 < found.num_graphs <= MOST_GRAPHS["qwen3_moe"]


@pytest.mark.slow
def test_fp8_experts_and_linear_layers_multiply_inside_compiled_ones(
    interpreter: RankPool, tmp_path: Path
) -> None:
    oracle = write_quantised("qwen3_moe", tmp_path, block=(128, 128), **WIDE)
    found = check_oracle(oracle, tmp_path, interpreter, "aot_eager")
    assert "wideep.device_linear" in found.operators
    assert found.num_graphs <= MOST_GRAPHS["qwen3_moe"]


@pytest.mark.slow
def test_inductors_code_gives_transformers_logits(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = write_checkpoint("mixtral", tmp_path, is_shallow=True)
    found = check_oracle(oracle, tmp_path, interpreter, "inductor")
    assert 0 < found.num_graphs <= MOST_GRAPHS["mixtral"]


def tokens_served(directory: Path, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Serve prompts with the engine's own loop."""
    built = build_interpreted(directory)
    asked = [request(str(index), prompt, max_tokens=4) for index, prompt in enumerate(prompts)]
    return serve(built, asked).token_ids


@pytest.mark.slow
def test_the_engine_serves_transformers_tokens(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = write_checkpoint("mixtral", tmp_path, is_shallow=True)
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 18, 9, 5)]
    served = interpreter.run(tokens_served, tmp_path, prompts, timeout_s=400.0)[0]
    for index, prompt in enumerate(prompts):
        made = oracle.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert served[str(index)] == made[0, len(prompt) :].tolist()


def rows_alone_and_among_others(directory: Path, is_invariant: bool) -> bool:
    """Return whether a sequence's logits have the same bits alone and next to another sequence."""
    built = build_interpreted(directory, batch_invariant=is_invariant)
    generator = torch.Generator().manual_seed(7)
    first, second = (torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (4, 30))
    alone = run_steps(built, [first], [[Part(0, 0, 3)], [Part(0, 3, 4)]])[0]
    both = [[Part(0, 0, 3), Part(1, 0, 29)], [Part(0, 3, 4), Part(1, 29, 30)]]
    return np.array_equal(run_steps(built, [first, second], both)[0], alone)


def test_batch_invariant_rows_have_the_same_bits_beside_others(interpreter: RankPool, tmp_path: Path) -> None:
    """The control: torch's products of four and of thirty-two rows add in different orders, like cuBLAS'.

    Latent attention uses two torch products, which may differ (docs/gpu.md). With both replaced by sums in a fixed
    order, deepseek_v3 passes this too.
    """
    make_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    assert interpreter.run(rows_alone_and_among_others, tmp_path, True, timeout_s=400.0)[0]
    assert not interpreter.run(rows_alone_and_among_others, tmp_path, False, timeout_s=400.0)[0]
