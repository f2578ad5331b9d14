"""Recurrences on CPU: `transformers`' own functions, one sequence at a time, are the oracle; cuts and threads change no bit."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from attention.recurrences import cpu as ours
from attention.recurrences.mixers import MixerCall
from dispatch.team import Team
from kvcache.paged_cache import LayerShape, PagedCache, StateShape
from kvcache.states import NO_STATE, StatePiece
from kvcache.step import Span, Step

LENGTHS = (1, 37, 5, 20)
CHANNELS, TAPS, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 300, 4, 4, 2, 24, 40
GROUPS, STATE_DIM, HEAD_DIM = 2, 8, 24


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Kind:
    """One recurrence: its inputs for some tokens, our function, the oracle, and what it keeps."""

    def __init__(
        self,
        state: StateShape,
        inputs: Callable[[int, int], tuple[Tensor, ...]],
        run: Callable[..., Tensor],
        oracle: Callable[..., Tensor],
        time_at: int,
    ) -> None:
        """`inputs` of (seed, tokens); `time_at`: the dimension of theirs and of the answer that tokens run along."""
        self.state, self.inputs, self.run, self.oracle, self.time_at = state, inputs, run, oracle, time_at


def convolution(activation: str | None) -> Kind:
    weight, bias = draw(1, CHANNELS, TAPS), draw(2, CHANNELS)
    return Kind(
        StateShape(tail=(TAPS - 1, CHANNELS)),
        lambda seed, tokens: (draw(seed, 1, tokens, CHANNELS).transpose(1, 2),),
        lambda call, x: ours.convolve(call, x, weight, bias, activation),
        lambda x: qwen.causal_conv1d_fn(x, weight, bias, activation),
        2,
    )


def delta(*, decay_per_channel: bool, is_normed: bool) -> Kind:
    key_heads = HEADS if decay_per_channel else KEY_HEADS
    dims = (HEADS, KEY_DIM) if decay_per_channel else (HEADS,)
    scale = 1.0 if is_normed else 0.3

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        query, key = (scale * draw(seed + index, 1, tokens, key_heads, KEY_DIM) for index in (1, 2))
        value, rate = draw(seed + 3, 1, tokens, HEADS, VALUE_DIM), draw(seed + 5, 1, tokens, HEADS).sigmoid()
        return query, key, value, -draw(seed + 4, 1, tokens, *dims).abs(), rate

    def oracle(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        function = (
            kimi.recurrent_kimi_delta_attention
            if decay_per_channel
            else qwen.torch_recurrent_gated_delta_rule
        )
        options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": is_normed}
        found: Tensor = function(query, key, value, g=decay, beta=rate, **options)[0]
        return found

    def run(
        call: MixerCall, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
    ) -> Tensor:
        return ours.delta_rule(call, query, key, value, decay, rate, use_qk_l2norm_in_kernel=is_normed)[0]

    return Kind(StateShape(recurrent=(HEADS, KEY_DIM, VALUE_DIM)), inputs, run, oracle, 1)


def mamba2() -> Kind:
    rates, skip, bias = -draw(1, HEADS).exp(), draw(2, HEADS), draw(3, HEADS)
    options = {"D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.2, 1.5)}

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        writes, reads = (draw(seed + index, 1, tokens, GROUPS, STATE_DIM) for index in (1, 2))
        return draw(seed, 1, tokens, HEADS, HEAD_DIM), draw(seed + 3, 1, tokens, HEADS), writes, reads

    return Kind(
        StateShape(recurrent=(HEADS, STATE_DIM, HEAD_DIM)),
        inputs,
        lambda call, x, time, writes, reads: ours.scan_heads(call, x, time, rates, writes, reads, **options),
        lambda x, time, writes, reads: nemotron.mamba2_chunk_scan(
            x, time, rates, writes, reads, chunk_size=8, **options
        ),
        1,
    )


def mamba() -> Kind:
    rates, skip, bias = -draw(1, CHANNELS, STATE_DIM).exp(), draw(2, CHANNELS), draw(3, CHANNELS)

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        of_channels = [draw(seed + index, 1, tokens, CHANNELS).transpose(1, 2) for index in range(3)]
        of_states = [draw(seed + index, 1, tokens, STATE_DIM).transpose(1, 2) for index in (3, 4)]
        return (*of_channels, *of_states)

    def given(
        function: Callable[..., Any], x: Tensor, time: Tensor, gate: Tensor, writes: Tensor, reads: Tensor
    ) -> Tensor:
        out: Tensor = function(
            x,
            time,
            rates,
            writes,
            reads,
            D=skip,
            z=gate,
            delta_bias=bias,
            delta_softplus=True,
            return_last_state=True,
        )[0]
        return out

    return Kind(
        StateShape(recurrent=(STATE_DIM, CHANNELS)),
        inputs,
        lambda call, *rows: given(lambda *x, **options: ours.scan_channels(call, *x, **options), *rows),
        lambda *rows: given(jamba.mamba_selective_scan, *rows),
        2,
    )


def lightning() -> Kind:
    slopes = draw(1, HEADS).exp() / 4

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        query, key = (draw(seed + index, 1, tokens, HEADS, KEY_DIM) for index in (1, 2))
        return query, key, draw(seed + 3, 1, tokens, HEADS, VALUE_DIM)

    def oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """By the definition: what a token sees of another fades with the distance."""
        places = torch.arange(query.shape[1])
        fading = torch.exp(-slopes[:, None, None] * (places[:, None] - places)).tril()
        scores = torch.einsum("bqhk,bthk->bhqt", query, key) * fading
        return torch.einsum("bhqt,bthv->bqhv", scores, value)

    return Kind(
        StateShape(recurrent=(HEADS, KEY_DIM, VALUE_DIM)),
        inputs,
        lambda call, query, key, value: ours.decaying_sum(call, query, key, value, slopes),
        oracle,
        1,
    )


KINDS = {
    "convolution": convolution(None),
    "convolution with silu": convolution("silu"),
    "gated delta rule": delta(decay_per_channel=False, is_normed=True),
    "gated delta rule of given lengths": delta(decay_per_channel=False, is_normed=False),
    "kimi delta attention": delta(decay_per_channel=True, is_normed=True),
    "lightning attention": lightning(),
    "mamba-2": mamba2(),
    "mamba": mamba(),
}
all_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


class Rank:
    """Runs steps of one layer."""

    def __init__(self, kind: Kind, threads: int = 1) -> None:
        self.kind = kind
        team = Team(threads) if threads > 1 else None
        self.step = Step(max_tokens=128, max_sequences=8, max_blocks=8, block_tokens=16, team=team)
        self.step.has_states = True
        self.cache = PagedCache([LayerShape(state=kind.state)], 1, 16)
        self.cache.step = self.step
        self.call = MixerCall(0)
        self.call.pages = SimpleNamespace(step=self.step, tails=self.cache.tails, states=self.cache.states)

    def run(
        self, pieces: Sequence[Sequence[StatePiece]], inputs: Sequence[tuple[Tensor, ...]]
    ) -> list[Tensor]:
        """Answers of each sequence's tokens, which are put behind each other, and padding behind them all."""
        at = self.kind.time_at
        self.step.fill([Span(0, sum(each.length for each in own), [0], own) for own in pieces])
        rows = self.step.num_padded - self.step.num_tokens
        padding = self.kind.inputs(99, rows) if rows else ()
        packed = [torch.cat(each, 1) if at == 1 else torch.cat([x.transpose(1, 2) for x in each], 1).transpose(1, 2)
                  for each in zip(*inputs, *([padding] if rows else []), strict=True)]  # fmt: skip
        out = self.kind.run(self.call, *packed)
        lengths = [each[0].shape[at] for each in inputs]
        *answers, left = torch.split(out, [*lengths, rows], at)
        assert not left.any(), "padding is zero"
        return answers


def whole(length: int, write: int = NO_STATE) -> list[StatePiece]:
    return [StatePiece(NO_STATE, write, length)]


@all_kinds
def test_sequences_of_a_batch_give_what_transformers_gives_for_each_alone(kind: Kind) -> None:
    inputs = [kind.inputs(10 * index, length) for index, length in enumerate(LENGTHS)]
    for found, own in zip(Rank(kind).run([whole(length) for length in LENGTHS], inputs), inputs, strict=True):
        wanted = kind.oracle(*own)
        assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-5), (found - wanted).abs().max()


@all_kinds
@pytest.mark.parametrize("threads", [1, 2])
def test_cuts_and_states_between_change_no_bit(kind: Kind, threads: int) -> None:
    at, inputs = kind.time_at, [kind.inputs(10 * index, length) for index, length in enumerate(LENGTHS)]
    wanted = Rank(kind).run([whole(length) for length in LENGTHS], inputs)
    rank = Rank(kind, threads)
    longest = inputs[1]
    first, *rest = [
        tuple(x.narrow(at, begin, length) for x in longest) for begin, length in ((0, 9), (9, 1), (10, 27))
    ]
    # Beside others, alone, and with two states left in the midst; what one step wrote the next reads, elsewhere in its batch.
    parts = [rank.run([whole(5), [StatePiece(NO_STATE, 3, 9)]], [inputs[2], first])[1]]
    parts += rank.run([[StatePiece(3, 7, 1)]], [rest[0]])
    parts += rank.run([[StatePiece(7, 1, 6), StatePiece(1, 2, 10), StatePiece(2, 0, 11)]], [rest[1]])
    assert torch.equal(torch.cat(parts, at), wanted[1])
    again = tuple(x.narrow(at, 26, 11) for x in longest)
    assert torch.equal(rank.run([[StatePiece(2, 5, 11)]], [again])[0], wanted[1].narrow(at, 26, 11)), (
        "from a snapshot"
    )
    for slots in (rank.cache.tails[0], rank.cache.states[0]):
        assert torch.equal(slots[0], slots[5]), "a step that is run again leaves the same state"


@all_kinds
def test_an_empty_step_is_zero(kind: Kind) -> None:
    rank = Rank(kind)
    rank.step.fill([])
    assert not kind.run(rank.call, *kind.inputs(0, rank.step.num_padded)).any()
