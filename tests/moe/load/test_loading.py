"""A rank reads its own weights and no other byte, and all layouts give equal bits. `test_refusals` has the errors.

The expected reads are computed here from the files' headers, by a reader that shares nothing with the product.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.load.loader import EXPERTS, WEIGHTS
from scheduler.assembly import KERNELS
from tests.fixtures import PoolOf
from tests.moe.loaded import SEQUENCES, Loaded, Tensors, assert_equal_bits, file_bytes, headers, load, rewrite
from tests.support.engines.serving import build, own_share, teacher_forced
from tests.support.models.families import write_checkpoint

RANKS = 4

EXPERTS_OF_RANKS = {8: [[0, 1], [2, 3], [4, 5], [6, 7]], 10: [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]}


@pytest.fixture(scope="module")
def reference(mixtral: Path) -> Loaded:
    """Return Mixtral on one rank."""
    return load(mixtral)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_experts"), [("qwen2_moe", 10), ("gpt_oss", 8)])
def test_each_of_four_ranks_reads_what_it_serves_and_answers_as_one_does(
    family: str, num_experts: int, checkpoint: Callable[[str], Path], pool_of: PoolOf
) -> None:
    """Per-expert tensors that do not divide evenly among ranks, and fused transposed ones with biases."""
    directory = checkpoint(family)
    ranks: list[Loaded] = pool_of(RANKS).run(load, directory)
    for rank, loaded in enumerate(ranks):
        own = EXPERTS_OF_RANKS[num_experts][rank]
        shared, experts = file_bytes(directory, num_experts, own.__contains__)
        assert (loaded.bytes_read, loaded.expert_bytes) == (shared + experts, experts)
        totals = {stage: total for stage, done, total in loaded.reports if done == total}
        biases = experts - totals["experts"]  # read with their matrices, and not counted
        assert totals["weights"] == shared and 0 <= biases < 0.03 * experts  # 2 % of a tiny model
        assert loaded.reserved_expert_bytes >= loaded.expert_bytes
    assert sum(loaded.expert_bytes for loaded in ranks) == file_bytes(directory, num_experts)[1]
    alone = load(directory)
    assert alone.bytes_read == sum(file_bytes(directory, num_experts))
    for rank, loaded in enumerate(ranks):
        assert_equal_bits(loaded.logits, alone.logits[rank::RANKS])


def test_progress_never_goes_back_and_ends_at_every_byte(mixtral: Path, reference: Loaded) -> None:
    stages = [stage for stage, *_ in reference.reports]
    assert list(dict.fromkeys(stages)) == [KERNELS, WEIGHTS, EXPERTS]
    for wanted, size in zip((WEIGHTS, EXPERTS), file_bytes(mixtral), strict=True):
        told = [(done, total) for stage, done, total in reference.reports if stage == wanted]
        assert told == sorted(told)
        assert {total for _, total in told} == {size}
        assert 0 < told[0][0] < size and told[-1][0] == size


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
    """The fused layout uses the model's own parameter names."""

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
    assert built.model.lm_head is built.model.net.get_input_embeddings().weight
    assert built.model.checkpoint.bytes_read == sum(header.num_bytes for header in headers(tmp_path).values())
    with torch.inference_mode():
        theirs = oracle(torch.tensor([SEQUENCES[0]])).logits[0].numpy()
    assert np.abs(teacher_forced(built, SEQUENCES[:1])[0] - theirs).max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_weights_give_the_bits_of_the_same_values_in_float32(
    dtype: torch.dtype, mixtral: Path, tmp_path: Path
) -> None:
    half = rewrite(mixtral, tmp_path / "half", lambda ts: {name: t.to(dtype) for name, t in ts.items()})
    kept, widened = load(half), load(half, "float32")
    same = load(
        rewrite(mixtral, tmp_path / "f32", lambda ts: {name: t.to(dtype).float() for name, t in ts.items()})
    )
    assert_equal_bits(kept.logits, same.logits)
    assert_equal_bits(widened.logits, same.logits)
    assert kept.bytes_read * 2 == same.bytes_read
    if dtype == torch.bfloat16:
        assert kept.expert_bytes == file_bytes(half)[1] == widened.expert_bytes // 2
        assert load(mixtral, "bfloat16").expert_bytes == kept.expert_bytes, "--dtype bfloat16 halves float32"


class Corrupted(NamedTuple):
    """One rank's rows before and after a change to an expert of another, and the rows that chose that expert."""

    before: list[np.ndarray]
    after: list[np.ndarray]
    chose_T: np.ndarray


def corrupt(directory: Path, expert: int) -> Corrupted:
    """Change one expert of the last layer on its rank. Later layers would mix rows. Collective."""
    built = build(directory, max_model_len=64)
    layer, own = built.model.layers[-1], own_share(SEQUENCES)
    for (
        module
    ) in built.model.net.modules():  # as modules, which call `run`; programs choose experts themselves
        vars(module).pop("forward", None)
    before, chosen = teacher_forced(built, own), []
    run = layer.run

    def recorded(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        chosen.append(ids_TK[: built.model.step.num_tokens].eq(expert).any(-1).numpy())
        return run(module, hidden_TD, ids_TK, weights_TK)

    layer.run = recorded  # type: ignore[method-assign]
    rank, slot = divmod(
        int(np.flatnonzero(built.model.placement.slot_expert[-1] == expert)[0]), layer.up.num_slots
    )
    if rank == (dist.get_rank() if dist.is_initialized() else 0):
        layer.up.at(slot).tensors()[""].add_(0.25)
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
