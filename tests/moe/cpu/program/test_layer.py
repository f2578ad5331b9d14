"""Programs return what the modules return, whole or split at the experts. Unsupported layers do not run as programs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcache.states import NO_STATE, StatePiece
from kvcache.step import Span
from moe.cpu.program.layer import LayerProgram
from moe.cpu.program.net import NetProgram, are_fit
from moe.cpu.program.step import DecoderProgram
from scheduler.assembly import Assembled
from tests.support.engines.serving import build
from tests.support.models.families import VOCABULARY

# Number of layers of a family that run as programs.
ADOPTED = {
    "qwen3_moe": 3,
    "mixtral": 3,
    "glm4_moe": 3,  # the first is dense, the others have a shared expert
    "gpt_oss": 0,  # angles of half a head
    "qwen2_moe": 3,  # the shared expert has a gate
    "olmoe": 0,  # norms over all heads together
    "deepseek_v3": 3,
    "granitemoe": 0,  # residuals have a factor
    "qwen3_next": 4,  # gated delta nets, gated attention, norms that add one to their weight
    "qwen3_5_moe_text": 4,
    "deepseek_v32": 0,  # an index
}


def programs(built: Assembled) -> list[LayerProgram]:
    """Return the programs that layers run as."""
    found = [getattr(module.forward, "__self__", None) for module in built.model.net.modules()]
    return [each for each in found if isinstance(each, LayerProgram)]


def forward(built: Assembled, batches: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Run steps. Return the logits of all their rows.

    Args:
        batches: By step and sequence, the number of earlier tokens and the number of tokens in the step.
    """
    step, cache = built.runner.step, built.runner._cache
    tokens = torch.randint(3, VOCABULARY, (8, 400), generator=torch.Generator().manual_seed(3))
    found = []
    for number, batch in enumerate(batches):
        spans = [
            Span(start, length, range(row * 8, row * 8 + 8), pieces_of(built, number, row, start, length))
            for row, (start, length) in enumerate(batch)
            if length
        ]
        ids = [tokens[row, start : start + length] for row, (start, length) in enumerate(batch)]
        step.fill(spans)
        inputs = step.inputs(torch.cat(ids).tolist(), range(step.num_tokens))
        found.append(built.model.forward(inputs.token_T, cache, inputs.row_R))
    return found


def pieces_of(built: Assembled, number: int, row: int, start: int, length: int) -> list[StatePiece]:
    """Return pieces with which each step reads the state that the previous one wrote."""
    if not built.runner.step.has_states:
        return []
    read = 2 * row + (number - 1) % 2 if start else NO_STATE
    return [StatePiece(read, 2 * row + number % 2, length)]


BATCHES = [[(0, 20), (0, 3), (0, 90)], [(20, 1), (3, 7), (90, 1)], [(21, 1), (10, 1), (91, 1)]]


@pytest.fixture
def opened(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Assembled]:
    """Return `opened(family)`: its engine on one rank, without programs if `as_modules` is True."""

    def engine(family: str, *, as_modules: bool = False, **settings: Any) -> Assembled:
        with monkeypatch.context() as patched:
            if as_modules:
                patched.setattr("moe.cpu.backend.adopt_layers", lambda *_: 0)
            return build(checkpoint(family), max_model_len=128, **settings)

    return engine


@pytest.mark.crossed("family", every=2)
@pytest.mark.parametrize("family", ADOPTED)
def test_programs_give_what_modules_give_and_the_bits_of_programs_of_their_parts(
    family: str, opened: Callable[..., Assembled]
) -> None:
    """A model is a program. Without it, its decoder is one, and then each of its layers."""
    ours, theirs = opened(family), opened(family, as_modules=True)
    assert (len(programs(ours)), len(programs(theirs))) == (ADOPTED[family], 0)
    whole = forward(ours, BATCHES)
    for found, wanted in zip(whole, forward(theirs, BATCHES), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    net = ours.model.net
    runs = [getattr(each.forward, "__self__", None) for each in (net, net.model)]
    is_program = [isinstance(run, kind) for run, kind in zip(runs, (NetProgram, DecoderProgram), strict=True)]
    assert is_program == [bool(ADOPTED[family])] * 2
    for module in (net, net.model) if ADOPTED[family] else ():
        del module.forward
        assert all(map(torch.equal, forward(ours, BATCHES), whole))


def test_angles_of_later_positions_are_the_model_s(opened: Callable[..., Assembled]) -> None:
    built = opened("qwen3_moe")
    program = built.model.net.forward.__self__
    assert isinstance(program, NetProgram)
    angles = program._angles
    for most in (1, 1024, 1025, 5000):
        angles.make(most)
        positions = torch.arange(angles._table.shape[1] - 32, angles._table.shape[1])
        assert angles._table.shape[1] >= most
        for made, wanted in zip(
            angles._table, built.model.net.model.rotary_emb(torch.empty(1), positions[None]), strict=True
        ):
            assert torch.equal(made[-32:], wanted[0])


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_angles_that_depend_on_more_than_positions_are_left_to_the_model(
    kind: str, opened: Callable[..., Assembled]
) -> None:
    net = opened("qwen3_moe", as_modules=True).model.net
    assert are_fit(net)
    net.model.rotary_emb.rope_type = kind
    assert not are_fit(net)


def test_a_model_that_scales_its_logits_keeps_its_own_code(
    opened: Callable[..., Assembled], monkeypatch: pytest.MonkeyPatch
) -> None:
    net_class = type(opened("qwen3_moe").model.net)
    own = net_class.forward

    def scaled(self: Any, *inputs: Any, **options: Any) -> Any:
        output = own(self, *inputs, **options)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(net_class, "forward", scaled)
    net = opened("qwen3_moe").model.net
    assert isinstance(net.model.forward.__self__, DecoderProgram) and "forward" not in vars(net)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_program_with_the_experts_in_it_gives_the_bits_of_one_without(
    family: str, opened: Callable[..., Assembled]
) -> None:
    whole, cut = opened(family), opened(family)
    assert any(program.may_be_whole for program in programs(whole))
    for program in programs(cut):
        program.may_be_whole = False
    for one, other in zip(forward(whole, BATCHES), forward(cut, BATCHES), strict=True):
        assert torch.equal(one, other)
    counts = [built.model.load_counts for built in (whole, cut)]
    assert (counts[0].table == counts[1].table).all() and counts[0].table.sum()
    assert all(each.experts_s > 0 for each in counts)
    samples = [[layer.sample_TD for layer in built.model.layers] for built in (whole, cut)]
    assert all(torch.equal(one, other) for one, other in zip(*samples, strict=True))


def test_two_threads_give_the_bits_of_one(opened: Callable[..., Assembled]) -> None:
    one, two = opened("glm4_moe"), opened("glm4_moe", threads=2)
    assert two.runner.step.team.num_threads == 2
    for ours, theirs in zip(forward(two, BATCHES), forward(one, BATCHES), strict=True):
        assert torch.equal(ours, theirs)


def test_other_experts_in_a_slot_are_those_that_serve(opened: Callable[..., Assembled]) -> None:
    built, other = opened("qwen3_moe"), opened("qwen3_moe")
    before = forward(built, BATCHES[:1])[0]
    for layer in built.model.layers:
        spare = layer.up.spare(), layer.down.spare()
        for slots, new, slot in ((layer.up, spare[0], 5), (layer.down, spare[1], 5)):
            for name, tensor in slots.at(slot).tensors().items():
                new.tensors()[name].copy_(tensor)
        layer.up.exchange(2, spare[0])
        layer.down.exchange(2, spare[1])
    changed = forward(built, BATCHES[:1])[0]
    assert not torch.equal(before, changed)
    for program in programs(other):
        program.may_be_whole = False
    for layer in other.model.layers:
        layer.up.exchange(2, layer.up.at(5))
        layer.down.exchange(2, layer.down.at(5))
    assert torch.equal(forward(other, BATCHES[:1])[0], changed)


def test_rows_of_no_batch_are_left_to_the_module(
    opened: Callable[..., Assembled], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = opened("qwen3_moe")
    program = programs(built)[0]
    asked: list[Any] = []
    layer = next(each for each in built.model.net.modules() if hasattr(each, "self_attn"))
    monkeypatch.setattr(type(layer), "forward", lambda *inputs, **options: asked.append((inputs, options)))
    rows = torch.zeros(1, 5, 64)
    program.forward(rows, position_embeddings=None, pages=built.runner._cache)
    assert asked[0][0] == (layer, rows) and asked[0][1]["pages"] is built.runner._cache
