"""A rank reads its own weights and no byte more; layouts give equal bits; what does not fit is told in one error.

What should be read is computed here from the files' headers, by a reader that shares nothing with the product.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.checkpoint import Checkpoint, CheckpointError
from scheduler.assembly import assemble
from scheduler.config import EngineConfig
from tests.conftest import PoolOf
from tests.support.families import VOCABULARY, write_checkpoint
from tests.support.serving import WaveDoorbell, build, own_share, teacher_forced

RANKS = 4
EXPERTS_OF_RANKS = {8: [[0, 1], [2, 3], [4, 5], [6, 7]], 10: [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]}
FUSED = ("experts.gate_up_proj", "experts.down_proj")
SEQUENCES = [
    torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (21, 5, 33, 12)
]
Tensors = dict[str, Tensor]


class Header(NamedTuple):
    """What one tensor's header says."""

    dtype: str
    shape: list[int]
    num_bytes: int


class Loaded(NamedTuple):
    """What one rank says about itself once loaded."""

    bytes_read: int
    expert_bytes: int
    reserved_expert_bytes: int
    reports: list[tuple[str, float]]
    logits: list[np.ndarray]  # of its share of SEQUENCES


def headers(directory: Path) -> dict[str, Header]:
    """Read all headers of a directory by the format's description: 8 bytes of length, then JSON."""
    found = {}
    for path in directory.glob("*.safetensors"):
        with path.open("rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start, end = entry["data_offsets"]
            found[name] = Header(entry["dtype"], entry["shape"], end - start)
    return found


def expected_bytes(directory: Path, num_experts: int, rank: int | None = None) -> tuple[int, int]:
    """Bytes of the tensors that are no experts', and of one rank's experts (all experts where it is None)."""
    own = range(num_experts) if rank is None else EXPERTS_OF_RANKS[num_experts][rank]
    shared = experts = 0
    for name, header in headers(directory).items():
        index = re.search(r"\.experts\.(\d+)\.", name)
        if index:
            experts += header.num_bytes if int(index.group(1)) in own else 0
        elif re.search(r"\.experts\.[a-z]", name):
            experts += header.num_bytes // num_experts * len(own)
        else:
            shared += header.num_bytes
    return shared, experts


def load(directory: Path, dtype: str = "auto") -> Loaded:
    """Assemble this rank's engine and run its share of the sequences; collective."""
    reports: list[tuple[str, float]] = []
    world = dist.is_initialized()
    config = EngineConfig(
        directory=directory, kv_cache_bytes=8 << 20, max_model_len=64, dtype=dtype,
        rank=dist.get_rank() if world else 0, world_size=dist.get_world_size() if world else 1,
    )  # fmt: skip
    built = assemble(config, WaveDoorbell(), lambda stage, fraction: reports.append((stage, fraction)))
    model = built.model
    return Loaded(
        model.checkpoint.bytes_read, model.expert_bytes, model.reserved_expert_bytes, reports,
        teacher_forced(built, own_share(SEQUENCES)),
    )  # fmt: skip


def rewrite(source: Path, target: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Copy a single-file checkpoint with its tensors changed."""
    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    changed = change(tensors)
    tensors = tensors if changed is None else changed
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def assert_equal_bits(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Logits are equal to the last bit."""
    for a, b in zip(ours, theirs, strict=True):
        assert np.array_equal(a, b)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(family)`: a family's checkpoint on disk, written once."""
    root = tmp_path_factory.mktemp("checkpoints")

    def written(family: str) -> Path:
        if not (root / family).is_dir():
            write_checkpoint(family, root / family)
        return root / family

    return written


@pytest.fixture(scope="module")
def mixtral(checkpoint: Callable[[str], Path]) -> Path:
    """A checkpoint with one tensor per expert."""
    return checkpoint("mixtral")


@pytest.fixture(scope="module")
def reference(mixtral: Path) -> Loaded:
    """Mixtral on one rank."""
    return load(mixtral)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_experts"), [("qwen2_moe", 10), ("gpt_oss", 8)])
def test_each_of_four_ranks_reads_what_it_serves_and_answers_as_one_does(
    family: str, num_experts: int, checkpoint: Callable[[str], Path], pool_of: PoolOf
) -> None:
    """Per-expert tensors that do not divide by ranks, and fused transposed ones with biases."""
    directory = checkpoint(family)
    ranks: list[Loaded] = pool_of(RANKS).run(load, directory)
    for rank, loaded in enumerate(ranks):
        assert loaded.bytes_read == sum(expected_bytes(directory, num_experts, rank))
        assert loaded.expert_bytes == expected_bytes(directory, num_experts, rank)[1]
        assert loaded.reserved_expert_bytes >= loaded.expert_bytes
    assert sum(loaded.expert_bytes for loaded in ranks) == expected_bytes(directory, num_experts)[1]
    alone = load(directory)
    assert alone.bytes_read == sum(expected_bytes(directory, num_experts))
    for rank, loaded in enumerate(ranks):
        assert_equal_bits(loaded.logits, alone.logits[rank::RANKS])


def test_progress_never_goes_back_and_reaches_one(reference: Loaded) -> None:
    stages = [stage for stage, _ in reference.reports]
    assert list(dict.fromkeys(stages)) == ["weights", "experts"]
    for wanted in ("weights", "experts"):
        fractions = [fraction for stage, fraction in reference.reports if stage == wanted]
        assert fractions == sorted(fractions)
        assert 0 < fractions[0] < 1 and fractions[-1] == 1.0


def test_a_sharded_checkpoint_gives_the_same_bits(mixtral: Path, reference: Loaded, tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert (tmp_path / "model.safetensors.index.json").is_file()
    sharded = load(tmp_path)
    assert_equal_bits(sharded.logits, reference.logits)
    assert sharded.bytes_read == reference.bytes_read


def test_fused_and_per_expert_layouts_give_the_same_bits(
    mixtral: Path, reference: Loaded, tmp_path: Path
) -> None:
    """The fused layout has the model's own parameter names."""

    def fuse(tensors: Tensors) -> Tensors:
        fused = {
            name.replace(".block_sparse_moe.", ".mlp."): t
            for name, t in tensors.items()
            if ".experts." not in name
        }
        for layer in range(3):
            prefix, old = (
                f"model.layers.{layer}.mlp.experts",
                f"model.layers.{layer}.block_sparse_moe.experts",
            )
            up = [
                torch.cat([tensors[f"{old}.{e}.w1.weight"], tensors[f"{old}.{e}.w3.weight"]])
                for e in range(8)
            ]
            fused[f"{prefix}.gate_up_proj"] = torch.stack(up)
            fused[f"{prefix}.down_proj"] = torch.stack([tensors[f"{old}.{e}.w2.weight"] for e in range(8)])
        return fused

    fused = load(rewrite(mixtral, tmp_path / "fused", fuse))
    assert_equal_bits(fused.logits, reference.logits)
    assert fused.bytes_read == reference.bytes_read


def test_tied_embeddings_are_read_once_and_shared(tmp_path: Path) -> None:
    oracle = write_checkpoint("granitemoe", tmp_path)
    assert "lm_head.weight" not in headers(tmp_path)
    built = build(tmp_path, max_model_len=64)
    assert built.model.lm_head is built.model._net.get_input_embeddings().weight
    assert built.model.checkpoint.bytes_read == sum(header.num_bytes for header in headers(tmp_path).values())
    with torch.inference_mode():
        theirs = oracle(torch.tensor([SEQUENCES[0]])).logits[0].numpy()
    assert np.abs(teacher_forced(built, SEQUENCES[:1])[0] - theirs).max() < 1e-4


def test_bfloat16_weights_kept_as_they_are_give_the_bits_of_float32(mixtral: Path, tmp_path: Path) -> None:
    halved = rewrite(mixtral, tmp_path / "bf16", lambda ts: {name: t.bfloat16() for name, t in ts.items()})
    kept, widened = load(halved), load(halved, "float32")
    assert_equal_bits(kept.logits, widened.logits)
    assert kept.expert_bytes == expected_bytes(halved, 8)[1]
    assert widened.expert_bytes == 2 * kept.expert_bytes
    narrowed = load(mixtral, "bfloat16")
    assert narrowed.expert_bytes == kept.expert_bytes, (
        "--dtype bfloat16 halves what a float32 checkpoint takes"
    )


def test_float16_weights_give_the_bits_of_the_same_values_in_float32(mixtral: Path, tmp_path: Path) -> None:
    half = rewrite(mixtral, tmp_path / "f16", lambda ts: {name: t.half() for name, t in ts.items()})
    same = rewrite(mixtral, tmp_path / "f32", lambda ts: {name: t.half().float() for name, t in ts.items()})
    assert_equal_bits(load(half).logits, load(same).logits)
    assert load(half).bytes_read * 2 == load(same).bytes_read


class Corrupted(NamedTuple):
    """One rank's rows before and after an expert of another was changed, and which rows chose that expert."""

    before: list[np.ndarray]
    after: list[np.ndarray]
    chose_T: np.ndarray


def corrupt(directory: Path, expert: int) -> Corrupted:
    """Change one expert of the last layer on the rank that holds it; collective. Later layers would mix rows."""
    built = build(directory, max_model_len=64)
    layer, own = built.model.layers[-1], own_share(SEQUENCES)
    before, chosen = teacher_forced(built, own), []
    run = layer.run

    def recorded(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        chosen.append(ids_TK[: layer.step.num_tokens].eq(expert).any(-1).numpy())
        return run(module, hidden_TD, ids_TK, weights_TK)

    layer.run = recorded  # type: ignore[method-assign]
    rank, slot = divmod(int(built.model.placement.expert_slot()[-1][expert]), len(layer.up.packed_S))
    if rank == (dist.get_rank() if dist.is_initialized() else 0):
        layer.up.packed_S[slot] += 0.25
    return Corrupted(before, teacher_forced(built, own), np.concatenate(chosen))


@pytest.mark.slow
def test_a_changed_expert_changes_just_the_rows_of_every_rank_that_chose_it(
    mixtral: Path, pool_of: PoolOf
) -> None:
    for expert in (1, 6):
        for found in pool_of(2).run(corrupt, mixtral, expert):
            before, after = np.concatenate(found.before), np.concatenate(found.after)
            assert np.array_equal((before != after).any(axis=1), found.chose_T)
            assert 0 < found.chose_T.sum() < len(found.chose_T)


def drop(*names: str) -> Callable[[Tensors], None]:
    """Take tensors away."""
    return lambda tensors: [tensors.pop(name) for name in names] and None


def refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Load on one rank; return the one error's message, raised before any tensor was read."""

    def read(_self: Checkpoint, tensor: Tensor) -> Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(Checkpoint, "_counted", read)
    with pytest.raises(CheckpointError) as caught:
        build(directory, max_model_len=64)
    return str(caught.value)


EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"


def test_one_error_lists_all_that_does_not_fit(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared tensors and experts alike, of all layers."""

    def break_everything(tensors: Tensors) -> None:
        drop("model.norm.weight", EXPERT.format(0, 7, "w3"), EXPERT.format(2, 5, "w2"))(tensors)
        for matrix in ("w1", "w2", "w3"):
            tensors[EXPERT.format(1, 8, matrix)] = torch.zeros(32, 64)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["lm_head.weight"] = torch.zeros(255, 64)
        tensors[EXPERT.format(0, 6, "w2")] = torch.zeros(64, 31)
        tensors[EXPERT.format(1, 2, "w1")] = torch.zeros(33, 64)
        tensors[EXPERT.format(1, 4, "w1")] = torch.zeros(32, 65)

    message = refused(rewrite(mixtral, tmp_path / "broken", break_everything), monkeypatch)
    missing, unexpected, wrong = message.split("\n")[1:]
    assert missing.startswith("  missing: ")
    assert "model.norm.weight" in missing
    assert "w3.weight for model.layers.0.mlp.experts.gate_up_proj of expert 7" in missing
    assert "model.layers.2.mlp.experts.down_proj of expert 5" in missing
    assert missing.count(",") == 2
    assert unexpected.startswith("  unexpected: ")
    for matrix in ("w1", "w2", "w3"):
        assert EXPERT.format(1, 8, matrix) in unexpected
    assert "model.layers.3.input_layernorm.weight" in unexpected
    assert wrong.startswith("  of the wrong shape: ")
    assert "lm_head.weight: [255, 64] instead of [256, 64]" in wrong
    assert (
        f"{EXPERT.format(0, 6, 'w2')} [64, 31], to make model.layers.0.mlp.experts.down_proj [64, 32]"
        in wrong
    )
    assert (
        f"{EXPERT.format(1, 2, 'w1')} [33, 64]" in wrong and f"{EXPERT.format(1, 4, 'w1')} [32, 65]" in wrong
    )


def assemble_fails(directory: Path) -> str:
    """Return the error of assembling this rank's engine."""
    with pytest.raises(CheckpointError) as caught:
        build(directory, max_model_len=64)
    return str(caught.value)


def test_every_rank_refuses_an_expert_that_only_another_holds(
    mixtral: Path, tmp_path: Path, pool_of: PoolOf
) -> None:
    broken = rewrite(
        mixtral, tmp_path / "broken", drop(*(EXPERT.format(0, 7, w) for w in ("w1", "w2", "w3")))
    )
    messages = set(pool_of(2).run(assemble_fails, broken))
    assert len(messages) == 1
    assert "model.layers.0.mlp.experts.gate_up_proj of expert 7" in messages.pop()


def test_a_fused_tensor_of_the_wrong_shape_is_refused(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.1.mlp.experts.down_proj"

    def narrow(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:7]

    message = refused(rewrite(checkpoint("gpt_oss"), tmp_path / "broken", narrow), monkeypatch)
    assert f"{name}: [7, 32, 64] instead of [8, 32, 64]" in message


def test_experts_given_twice_are_refused(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def double(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(8, 64, 32)
        tensors["model.layers.1.mlp.experts.0.w1.weight"] = torch.zeros(32, 64)

    message = refused(rewrite(mixtral, tmp_path / "double", double), monkeypatch)
    assert "unexpected" in message
    assert EXPERT.format(0, 0, "w2") in message and "layers.1.mlp.experts.0.w1.weight" in message


def test_long_lists_are_cut_and_counted(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(tensors: Tensors) -> Tensors:
        return {f"other.{name}": tensor for name, tensor in tensors.items()}

    message = refused(rewrite(mixtral, tmp_path / "other", rename), monkeypatch)
    assert len(message) < 20_000
    assert re.search(r"missing: .* and \d+ more\n  unexpected: .* and \d+ more$", message)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_quantised_tensors_are_refused_by_their_type(
    dtype: torch.dtype, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def quantise(tensors: Tensors) -> Tensors:
        return {name: t.to(dtype) if ".experts." in name else t for name, t in tensors.items()}

    message = refused(rewrite(mixtral, tmp_path / "quantised", quantise), monkeypatch)
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.int8: "I8"}[dtype]
    assert f"72 of type {kind}" in message and "bfloat16, float16 or float32" in message


def cut(directory: Path) -> None:
    """Cut the file short."""
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def no_tensors(directory: Path) -> None:
    """Only another format is left."""
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


def index(content: str) -> Callable[[Path], None]:
    """Put an index beside the file."""
    return lambda directory: (directory / "model.safetensors.index.json").write_text(content) and None


DAMAGES = {
    "cut short": (cut, "model.safetensors is not a readable safetensors file"),
    "a pointer of git-lfs": (
        lambda directory: (directory / "model.safetensors").write_text("version https://git-lfs") and None,
        "model.safetensors is not a readable safetensors file",
    ),
    "none": (no_tensors, "holds no .safetensors files"),
    "index without its shard": (
        index('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
        "names files that are not there: model-00001-of-00002.safetensors",
    ),
    "index not JSON": (index("{"), "model.safetensors.index.json is not a safetensors index"),
    "index of another form": (
        index('{"weight_map": 3}'),
        "model.safetensors.index.json is not a safetensors index",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(
    damage: str, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = shutil.copytree(mixtral, tmp_path / "broken")
    hurt, message = DAMAGES[damage]
    hurt(broken)
    assert message in refused(broken, monkeypatch)
