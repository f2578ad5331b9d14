"""Drafts of multi-token-prediction layers equal transformers' own, at 1 and 2 ranks. Models without them are rejected."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from moe.cpu.program.draft import DraftProgram
from moe.cpu.program.layer import LayerProgram
from moe.expert_weights import SpareSlots
from moe.families import UnsupportedModelError
from moe.load.checkpoint import CheckpointError
from moe.model import Skeleton
from moe.mtp.layers import drafting_of
from moe.mtp.names import MtpNames
from scheduler.moves.telemetry import expert_map
from tests.fixtures import PoolOf
from tests.moe.loaded import headers, rewrite
from tests.support.engines.serving import build, misroute, own_share
from tests.support.models.drafts import DraftingModel, Rows, open_drafting, rows_of
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.models.mtp import PUBLISHED, Drafter, Tensors, write_mtp_checkpoint
from tests.support.models.quantise import fp8_config, is_fp8, quantise_fp8
from tests.support.placement.placements import random_placement

TOLERANCE = 1e-4
DEPTH = 3
LENGTHS = (21, 9, 14)
PREFILL = 5  # first rows of each text at once, the rest one at a time
ON_TWO_RANKS = ("deepseek_v3", "qwen3_next", "mimo_v2_flash")
TEXTS = [
    torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS
]
Write = Callable[[str, int], Drafter]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Return `written(family, num_layers)`: a checkpoint on disk, written once."""
    made: dict[tuple[str, int], Drafter] = {}

    def write(family: str, num_layers: int) -> Drafter:
        key = family, num_layers
        if key not in made:
            made[key] = write_mtp_checkpoint(family, tmp_path_factory.mktemp(family), num_layers=num_layers)
        return made[key]

    return write


class Drafted(NamedTuple):
    """Logits of one text: of depth 0 for all of its rows, and of deeper drafts from its last ones."""

    first: np.ndarray  # [rows, V]
    deeper: list[np.ndarray]  # [rows, V] each


@torch.inference_mode()
def wanted(drafter: Drafter, text: list[int]) -> Drafted:
    """Return the drafts of transformers."""
    num_layers, chain = len(drafter.mtp.layers), drafter.start()
    count = len(text) - DEPTH
    hidden = drafter.hidden(text)[:count]
    logits, hidden = chain.run(0, text[1 : count + 1], hidden, 0)
    first, deeper = logits.numpy(), []
    for depth in range(1, DEPTH):
        if depth < num_layers:
            # Every layer has its own cache, of the same rows as the first.
            logits, hidden = chain.run(depth, text[1 + depth : count + 1 + depth], hidden, 0)
        else:
            # A single layer continues after its last row, as if that had been a token's.
            at = count - 1 + depth
            logits, hidden = chain.run(0, [text[at + 1]], hidden[-1:], at)
        deeper.append(logits.numpy())
    return Drafted(first, deeper)


def draft_all(model: DraftingModel, texts: Sequence[list[int]], num_layers: int) -> list[Drafted]:
    """Return our drafts of all texts together: some rows at once, then one at a time, then deeper."""
    model.forward(texts)
    starts = np.cumsum([0, *map(len, texts)])
    counts = [len(text) - DEPTH for text in texts]
    found: list[list[np.ndarray]] = [[] for _ in texts]
    most = max(map(len, TEXTS))  # equal on every rank: drafts are collective

    def parts_of(begin: int, end: int) -> list[Rows]:
        return [
            Rows(at, begin, text[begin + 1 : last + 1], list(range(starts[at] + begin, starts[at] + last)))
            for at, text in enumerate(texts)
            if (last := min(end, counts[at])) > begin
        ]

    for begin, end in [(0, PREFILL), *((at, at + 1) for at in range(PREFILL, most))]:
        parts = parts_of(begin, end)
        for part, logits in zip(parts, model.draft(0, parts), strict=True):
            found[part.text].append(logits)
    deeper: list[list[np.ndarray]] = [[] for _ in texts]
    parts = parts_of(0, most)
    model.draft(0, parts)
    for depth in range(1, DEPTH):
        rows = np.cumsum([0, *(len(part.tokens) for part in parts)])
        if depth < num_layers:
            parts = [
                Rows(at, 0, text[1 + depth : counts[at] + 1 + depth], list(range(rows[at], rows[at + 1])))
                for at, text in enumerate(texts)
            ]
        else:
            parts = [
                Rows(at, counts[at] - 1 + depth, [text[counts[at] + depth]], [int(rows[at + 1]) - 1])
                for at, text in enumerate(texts)
            ]
        for part, logits in zip(parts, model.draft(depth, parts), strict=True):
            deeper[part.text].append(logits)
    return [Drafted(np.concatenate(rows), more) for rows, more in zip(found, deeper, strict=True)]


def worst(ours: Drafted, theirs: Drafted) -> float:
    """Return the largest difference of any logit."""
    pairs = [(ours.first, theirs.first), *zip(ours.deeper, theirs.deeper, strict=True)]
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def answer(directory: Path, texts: list[list[int]], num_layers: int) -> tuple[list[Drafted], list[Drafted]]:
    """Draft this rank's share, correctly and with permuted experts."""
    model = open_drafting(directory)
    own = own_share(texts)
    drafted = draft_all(model, own, num_layers)
    misroute(model.model)
    return drafted, draft_all(model, own, num_layers)


CASES = [
    *((family, 1, 1) for family in PUBLISHED),
    ("deepseek_v3", 3, 1),
    ("mimo_v2_flash", 3, 1),
    *((family, 1, 2) for family in ON_TWO_RANKS),
]


@pytest.mark.crossed("family", every=2)
@pytest.mark.parametrize(("family", "num_layers", "world_size"), CASES)
def test_drafts_equal_transformers(
    family: str, num_layers: int, world_size: int, written: Write, pool_of: PoolOf
) -> None:
    drafter = written(family, num_layers)
    oracles = [wanted(drafter, text) for text in TEXTS]
    for rank, (right, permuted) in enumerate(
        pool_of(world_size).run(answer, drafter.directory, TEXTS, num_layers)
    ):
        of_rank = oracles[rank::world_size]
        assert len(right) == len(of_rank) > 0
        for ours, changed, theirs in zip(right, permuted, of_rank, strict=True):
            assert worst(ours, theirs) < TOLERANCE
            assert worst(changed, theirs) > 100 * TOLERANCE, "the control did not fail"


def test_what_drafts_start_from_is_kept_whatever_ran_the_step(written: Write) -> None:
    """A step in one program, one with prompt logprobs, one of a single token: each leaves the same bits."""
    text = TEXTS[0]
    model = open_drafting(written("deepseek_v3", 1).directory)
    assert "forward" in vars(model.model.net), "the model must run as one program"
    model.forward([text])
    whole = model.draft(0, rows_of(0, text[1:]))[0]
    kept = model.model._hidden_TD[: len(text)].clone()
    model.forward([text], keeps_hidden=True)
    scored = model.model.logits_of(torch.arange(len(text)))
    assert torch.equal(model.model._hidden_TD[: len(text)], kept)
    assert np.array_equal(model.draft(0, rows_of(0, text[1:]))[0], whole)
    assert torch.equal(model.model.logits_of(torch.arange(len(text))), scored), "drafts change scores"
    model.forward([text[:-2]])
    model.draft(0, rows_of(0, text[1:-1]))
    model.forward([text[-2:-1]], [len(text) - 2])
    assert np.array_equal(model.draft(0, rows_of(len(text) - 2, text[-1:]))[0], whole[-1:])


def first_drafts(model: DraftingModel, texts: list[list[int]]) -> list[np.ndarray]:
    """Return the first drafts of texts, in one step."""
    return [drafted.first for drafted in draft_all(model, texts, 1)]


def spread_and_idle(directory: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the first drafts of this rank's texts, and those of the first text, which one rank has."""
    model = open_drafting(directory)
    return first_drafts(model, own_share(TEXTS)), first_drafts(model, own_share(TEXTS[:1]))


@pytest.fixture(scope="module")
def together(written: Write) -> list[np.ndarray]:
    """Return the first drafts of all texts on one rank."""
    return first_drafts(open_drafting(written("glm4_moe", 1).directory), TEXTS)


def test_drafts_have_the_same_bits_on_any_ranks_and_beside_any_rows(
    written: Write, together: list[np.ndarray], pool_of: PoolOf
) -> None:
    directory = written("glm4_moe", 1).directory
    model = open_drafting(directory)
    alone = [first_drafts(model, [text])[0] for text in TEXTS]
    (first, idle), (second, nothing) = pool_of(2).run(spread_and_idle, directory)
    assert not nothing, "a rank without a text runs padded rows while the other has rows"
    for ours in (alone, [first[0], second[0], first[1]], idle):
        for a, b in zip(ours, together, strict=False):
            assert np.array_equal(a, b)


def moved(directory: Path, texts: list[list[int]]) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Return first drafts with experts placed at random, drafts after a move, and the choices counted in that layer."""
    model, own = open_drafting(directory, slots=6), own_share(texts)
    before = [drafted.first for drafted in draft_all(model, own, 1)]
    inner, rank = model.model, dist.get_rank()
    old = inner.placement
    new = random_placement(old.num_layers, old.num_experts, old.num_ranks, old.slots_per_rank, seed=9)
    held, wanted = old.local(rank).tolist(), new.local(rank).tolist()
    assert held[-1] != wanted[-1], "experts of the drafting layer must move"
    inner.hold(wanted, held, SpareSlots(), 1)
    inner.serve(new, rank, inner.layers[0].dispatcher)
    after = [drafted.first for drafted in draft_all(model, own, 1)]
    return before, after, int(inner.load_counts.table[-1, :, : old.num_experts].sum())


def test_experts_of_layers_that_draft_are_placed_counted_and_moved_like_others(
    written: Write, together: list[np.ndarray], pool_of: PoolOf
) -> None:
    directory = written("glm4_moe", 1).directory
    rows = [2 * (len(text) - DEPTH) + DEPTH - 1 for text in TEXTS]  # drafting rows; each has two experts
    for rank, (before, after, counted) in enumerate(pool_of(2).run(moved, directory, TEXTS)):
        for a, b, wanted_bits in zip(before, after, together[rank::2], strict=True):
            assert np.array_equal(a, wanted_bits) and np.array_equal(b, wanted_bits)
        assert counted == 2 * sum(rows[rank::2])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_layers_run_as_programs_and_give_the_bits_of_their_modules(family: str, written: Write) -> None:
    model = open_drafting(written(family, 1).directory)
    drafting = drafting_of(model.model.net)
    assert drafting is not None
    for block in drafting.layers.values():
        assert isinstance(getattr(vars(block)["forward"], "__self__", None), LayerProgram)
    assert isinstance(drafting.programs[0], DraftProgram)
    draft_all(model, TEXTS, 1)  # until samples of the experts' inputs are kept
    ours = draft_all(model, TEXTS, 1)
    drafting.programs.clear()
    for a, b in zip(ours, draft_all(model, TEXTS, 1), strict=True):
        assert all(map(np.array_equal, [a.first, *a.deeper], [b.first, *b.deeper]))


def test_swapped_norms_draft_something_else(written: Write, tmp_path: Path) -> None:
    """Control: the projection of token and hidden state does not confuse the two."""
    drafter = written("glm4_moe", 1)

    def swap(tensors: Tensors) -> Tensors:
        names = {
            name: name.replace("enorm", "?").replace("hnorm", "enorm").replace("?", "hnorm")
            for name in tensors
        }
        return {names[name]: tensor for name, tensor in tensors.items()}

    swapped = open_drafting(rewrite(drafter.directory, tmp_path / "swapped", swap))
    found = draft_all(swapped, TEXTS, 1)
    for ours, text in zip(found, TEXTS, strict=True):
        assert worst(ours, wanted(drafter, text)) > 100 * TOLERANCE


@pytest.mark.crossed("family", every=3)
@pytest.mark.parametrize("family", PUBLISHED)
def test_layers_that_are_not_wanted_are_left_unread(family: str, written: Write) -> None:
    drafter = written(family, 1)
    directory, count = drafter.directory, drafter.model.config.get_text_config().num_hidden_layers
    names = MtpNames(headers(directory), count)
    of_mtp = {name for name in headers(directory) if names.renamed(name) is not None}
    model = build(directory, max_model_len=64).model
    unread = sum(headers(directory)[name].num_bytes for name in of_mtp)
    drafting = open_drafting(directory).model
    assert len(of_mtp) > 8 and drafting.checkpoint.bytes_read - model.checkpoint.bytes_read == unread
    shapes = drafting.skeleton.cache_shapes
    assert shapes[:count] == model.skeleton.cache_shapes
    assert sum(shape.num_kv_heads > 0 for shape in shapes[count:]) == 1
    has_experts = any(".experts." in name for name in of_mtp)
    assert len(drafting.layers) == len(model.layers) + has_experts
    experts = expert_map(drafting.placement, list(drafting.skeleton.experts), count)
    assert not has_experts or count <= experts.layers[-1] < experts.num_hidden_layers


@pytest.mark.parametrize("family", ["mixtral", "qwen3_next"])
def test_a_checkpoint_without_such_layers_is_refused(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no layers for multi-token prediction") as caught:
        Skeleton(tmp_path, has_mtp=True)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_in_fp8_drafts_what_its_weights_stand_for(tmp_path: Path) -> None:
    block, plain, packed = (128, 128), tmp_path / "plain", tmp_path / "packed"

    def mean(tensors: Tensors) -> Tensors:
        return {
            name: quantise_fp8(each, block).meaning if is_fp8(name, each) else each
            for name, each in tensors.items()
        }

    def store(tensors: Tensors) -> Tensors:
        coded = {
            name: quantise_fp8(each, block).stored for name, each in tensors.items() if is_fp8(name, each)
        }
        kept = {name: each for name, each in tensors.items() if name not in coded}
        return kept | {f"{name}{leaf}": part for name, parts in coded.items() for leaf, part in parts.items()}

    settings = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
    drafter = write_mtp_checkpoint("deepseek_v3", plain, change=mean, **settings)
    rewrite(plain, packed, store)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": fp8_config(block)}))
    model = open_drafting(packed)
    drafting = drafting_of(model.model.net)
    assert drafting is not None and 0 in drafting.programs
    assert drafting.heads[0].get_submodule("eh_proj").weight.panels.dtype is torch.float8_e4m3fn  # type: ignore[union-attr]
    for ours, text in zip(draft_all(model, TEXTS, 1), TEXTS, strict=True):
        assert worst(ours, wanted(drafter, text)) < TOLERANCE


def test_tensors_that_are_missing_or_too_many_are_listed(written: Write, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {
            name.replace("layers.3.enorm", "layers.3.odd").replace("experts.5.up", "experts.5.odd"): tensor
            for name, tensor in tensors.items()
        }

    changed = rewrite(written("glm4_moe", 1).directory, tmp_path / "changed", change)
    with pytest.raises(CheckpointError) as caught:
        open_drafting(changed)
    message = str(caught.value)
    assert "missing:" in message and "drafting.heads.0.enorm.weight" in message
    assert "unexpected:" in message and "model.layers.3.odd.weight" in message
