"""`wideep size` predicts what an engine has after a start with the same flags, for tiny models on CPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.paged_cache import BLOCK_TOKENS
from moe.families import UnsupportedModelError, experts_modules
from moe.text_part import decoder_layers
from server.cli import main
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.serve.preflight.memory import WeightBytes, float_bytes, rank_bytes
from server.tools.size.costs import read_model as read_model_module
from server.tools.size.costs.device_table import DEVICES
from server.tools.size.costs.fit import rank_memory
from server.tools.size.costs.read_model import ReadModel, read_model
from tests.support.engines.serving import build
from tests.support.models.families import write_checkpoint
from tests.support.models.quantise import write_quantised
from tests.support.service.real_service import START_S, RealService, write_tiny_model

# Large enough that norms are small next to matrices, and that experts' rows fill the kernels' panels.
_SIZES = {"hidden_size": 128, "moe_intermediate_size": 64}
_WRITERS: dict[str, Callable[[Path], Any]] = {
    "deepseek_v3": lambda path: write_checkpoint("deepseek_v3", path),
    "qwen3_moe": lambda path: write_checkpoint("qwen3_moe", path),
    "gpt_oss, mxfp4": lambda path: write_quantised("gpt_oss", path),
    "qwen3_next": lambda path: write_checkpoint("qwen3_next", path),
    "llama4": lambda path: write_checkpoint("llama4", path),
    "qwen3_moe, fp8": lambda path: write_quantised("qwen3_moe", path, block=(32, 32), **_SIZES),
    "deepseek_v3, fp8": lambda path: write_quantised("deepseek_v3", path, block=(32, 32), **_SIZES),
}
_LIMITS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
_KV_BYTES = 8 << 20


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write each checkpoint once."""
    found: dict[str, Path] = {}

    def write(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp("model")
            _WRITERS[name](found[name])
        return found[name]

    return write


def _options(directory: Path, **more: Any) -> Options:
    options = options_from_keywords(
        str(directory), {**_LIMITS, "kv_cache_memory": _KV_BYTES, **more}, environment={}
    )
    return replace(options, device="cpu")


def _read(path: Path, options: Options) -> ReadModel:
    return read_model(
        path, on_gpu=False, float_bytes=float_bytes(options), max_model_len=options.engine.max_model_len
    )


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", _WRITERS)
def test_config_alone_says_what_the_files_say(written: Callable[[str], Path], name: str) -> None:
    directory = written(name)
    options = _options(directory)
    with_files, alone = _read(directory, options), _read(directory / "config.json", options)
    assert with_files.has_files and not alone.has_files
    _assert_near(alone.weights, with_files.weights)
    assert alone.shapes == with_files.shapes and alone.costs == with_files.costs


def _assert_near(one: WeightBytes, other: WeightBytes) -> None:
    """Compare to 1%: files keep a few tensors in another type, such as routers' corrections and scales of partial blocks."""
    assert one.expert_layers == other.expert_layers
    assert one.experts == pytest.approx(other.experts, rel=0.01)
    assert one.shared == pytest.approx(other.shared, rel=0.01)


@pytest.mark.slow  # builds engines, which takes seconds each
@pytest.mark.parametrize("name", _WRITERS)
def test_an_engine_has_the_kv_tokens_states_and_weights_that_were_said(
    written: Callable[[str], Path], name: str
) -> None:
    directory = written(name)
    options = _options(directory)
    said = rank_memory(_read(directory, options), DEVICES["cpu"], options, 1)
    built = build(directory, kv_cache_bytes=_KV_BYTES, **_LIMITS)
    try:
        assert said.kv_tokens == built.num_blocks * BLOCK_TOKENS
        assert said.num_states == built.num_states
        assert said.slots_per_rank == built.model.placement.slots_per_rank
        assert said.expert_weights == pytest.approx(built.model.expert_bytes, rel=0.01)
    finally:
        built.engine.close()
    assert said.shared_weights + said.expert_weights + said.spare_experts == rank_bytes(options, 1)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([], "0 were found, and model.layers.1.mlp.experts is in none of them"),
        (slice(1, None), "were found, and "),
    ],
)
def test_a_model_whose_layers_are_not_found_is_refused_instead_of_counted_as_shared(
    written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, found: Any, says: str
) -> None:
    directory = written("deepseek_v3")
    monkeypatch.setattr(
        read_model_module, "decoder_layers", lambda model: decoder_layers(model)[found] if found else []
    )
    with pytest.raises(UnsupportedModelError, match="cannot be counted") as caught:
        _read(directory / "config.json", _options(directory))
    assert says in str(caught.value)


def test_ranks_share_experts_and_keep_room_for_those_that_move(written: Callable[[str], Path]) -> None:
    directory = written("qwen3_moe")
    options = _options(directory, eplb_config={"num_redundant_experts": 3})
    model = _read(directory, options)
    said = rank_memory(model, DEVICES["cpu"], options, 2)
    experts = model.costs.num_experts
    assert said.slots_per_rank == -(-(experts + 3) // 2)
    assert said.num_redundant == 2 * said.slots_per_rank - experts
    assert said.shared_weights + said.expert_weights + said.spare_experts == rank_bytes(options, 2)


def test_costs_count_every_weight_of_a_model_once(written: Callable[[str], Path]) -> None:
    """Compare with the modules: all matrices except the embedding."""
    from moe.model import Skeleton  # noqa: PLC0415 - heavy, and only for this test

    directory = written("deepseek_v3")
    skeleton = Skeleton(directory)
    model = skeleton.model
    embedded = model.get_input_embeddings().weight.numel()
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() >= 2)
    costs = _read(directory, _options(directory)).costs
    assert costs.total_weights == matrices - embedded
    assert costs.num_expert_layers == len(experts_modules(model))


@pytest.mark.slow  # starts a service
def test_a_service_reports_the_kv_tokens_that_size_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with RealService.serve(
        model, tmp_path / "log", "-dp", "2", "--max-num-seqs", "8", "--kv-cache-dtype", "int8"
    ) as service:
        service.wait_ready()
        reported = service.get("/server_info", timeout_s=START_S).json()
    words = [
        "size",
        str(model),
        "--device",
        "this",
        "-dp",
        "2",
        "--max-num-seqs",
        "8",
        "--kv-cache-dtype",
        "int8",
    ]
    words += ["--kv-cache-memory", "16M", "--input", "20", "--output", "10", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["memory_per_rank"]["kv_tokens"] * 2 == reported["max_total_num_tokens"]
    assert said["model"]["max_model_len"] == reported["context_length"]
