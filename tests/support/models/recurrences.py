"""Test recurrences on every device: inputs, `transformers`' own functions as the oracle, and the state that each keeps."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.models.jamba import modeling_jamba as jamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.nemotron_h import modeling_nemotron_h as nemotron
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from attention.recurrences.mixers import REPLACED, MixerCall, decaying_sum
from kvcache.paged_cache import PagedCache, StateShape
from kvcache.states import NO_STATE, StatePiece
from kvcache.step import Span, Step

LENGTHS = (1, 37, 5, 20)
CHANNELS, TAPS, HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 300, 4, 4, 2, 24, 40
GROUPS, STATE_DIM, HEAD_DIM = 2, 8, 24


def draw(device: str, seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def replaced(name: str, ours: Any, call: MixerCall) -> Callable[..., Any]:
    """Return the function that takes the place of `transformers`' function of this name on a device."""
    return partial(REPLACED[name], ours.RECURRENCES, call)


class Kind:
    """One recurrence: its inputs for some tokens, our function, the oracle, and the shape of its state."""

    def __init__(
        self,
        state: StateShape,
        inputs: Callable[[int, int], tuple[Tensor, ...]],
        run: Callable[..., Tensor],
        oracle: Callable[..., Tensor],
        time_at: int,
    ) -> None:
        """`inputs` takes (seed, tokens). `run` takes (a device's module of recurrences, call, *inputs). `time_at` is the token
        dimension of the inputs and the output."""
        self.state, self.inputs, self.run, self.oracle, self.time_at = state, inputs, run, oracle, time_at


def convolution(device: str, activation: str | None) -> Kind:
    weight, bias = draw(device, 1, CHANNELS, TAPS), draw(device, 2, CHANNELS)
    return Kind(
        StateShape(tail=(TAPS - 1, CHANNELS)),
        lambda seed, tokens: (draw(device, seed, 1, tokens, CHANNELS).transpose(1, 2),),
        lambda ours, call, x: replaced("causal_conv1d_fn", ours, call)(x, weight, bias, activation),
        lambda x: qwen.causal_conv1d_fn(x, weight, bias, activation),
        2,
    )


def delta(device: str, *, decay_per_channel: bool, is_normed: bool) -> Kind:
    key_heads = HEADS if decay_per_channel else KEY_HEADS
    dims = (HEADS, KEY_DIM) if decay_per_channel else (HEADS,)
    scale = 1.0 if is_normed else 0.3

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        query, key = (scale * draw(device, seed + index, 1, tokens, key_heads, KEY_DIM) for index in (1, 2))
        value, rate = (
            draw(device, seed + 3, 1, tokens, HEADS, VALUE_DIM),
            draw(device, seed + 5, 1, tokens, HEADS).sigmoid(),
        )
        return query, key, value, -draw(device, seed + 4, 1, tokens, *dims).abs(), rate

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
        ours: Any, call: MixerCall, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor
    ) -> Any:
        run_rule = replaced("torch_chunk_gated_delta_rule", ours, call)
        return run_rule(query, key, value, decay, rate, use_qk_l2norm_in_kernel=is_normed)[0]

    return Kind(StateShape(recurrent=(HEADS, KEY_DIM, VALUE_DIM)), inputs, run, oracle, 1)


def mamba2(device: str) -> Kind:
    rates, skip, bias = -draw(device, 1, HEADS).exp(), draw(device, 2, HEADS), draw(device, 3, HEADS)
    options = {"D": skip, "dt_bias": bias, "dt_softplus": True, "dt_limit": (0.2, 1.5)}

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        writes, reads = (draw(device, seed + index, 1, tokens, GROUPS, STATE_DIM) for index in (1, 2))
        return (
            draw(device, seed, 1, tokens, HEADS, HEAD_DIM),
            draw(device, seed + 3, 1, tokens, HEADS),
            writes,
            reads,
        )

    return Kind(
        StateShape(recurrent=(HEADS, STATE_DIM, HEAD_DIM)),
        inputs,
        lambda ours, call, x, time, writes, reads: replaced("mamba2_chunk_scan", ours, call)(
            x, time, rates, writes, reads, **options
        ),
        lambda x, time, writes, reads: nemotron.mamba2_chunk_scan(
            x, time, rates, writes, reads, chunk_size=8, **options
        ),
        1,
    )


def mamba(device: str) -> Kind:
    rates, skip, bias = (
        -draw(device, 1, CHANNELS, STATE_DIM).exp(),
        draw(device, 2, CHANNELS),
        draw(device, 3, CHANNELS),
    )

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        of_channels = [draw(device, seed + index, 1, tokens, CHANNELS).transpose(1, 2) for index in range(3)]
        of_states = [draw(device, seed + index, 1, tokens, STATE_DIM).transpose(1, 2) for index in (3, 4)]
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
        lambda ours, call, *rows: given(replaced("mamba_selective_scan", ours, call), *rows),
        lambda *rows: given(jamba.mamba_selective_scan, *rows),
        2,
    )


def lightning(device: str) -> Kind:
    slopes = draw(device, 1, HEADS).exp() / 4

    def inputs(seed: int, tokens: int) -> tuple[Tensor, ...]:
        query, key = (draw(device, seed + index, 1, tokens, HEADS, KEY_DIM) for index in (1, 2))
        return query, key, draw(device, seed + 3, 1, tokens, HEADS, VALUE_DIM)

    def oracle(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend by the definition: the weight of an earlier token decays with its distance."""
        places = torch.arange(query.shape[1], device=query.device)
        fading = torch.exp(-slopes[:, None, None] * (places[:, None] - places)).tril()
        scores = torch.einsum("bqhk,bthk->bhqt", query, key) * fading
        return torch.einsum("bhqt,bthv->bqhv", scores, value)

    return Kind(
        StateShape(recurrent=(HEADS, KEY_DIM, VALUE_DIM)),
        inputs,
        lambda ours, call, query, key, value: ours.delta_rule(call, decaying_sum(query, key, value, slopes)),
        oracle,
        1,
    )


KINDS: dict[str, Callable[[str], Kind]] = {  # by device
    "convolution": lambda device: convolution(device, None),
    "convolution with silu": lambda device: convolution(device, "silu"),
    "gated delta rule": lambda device: delta(device, decay_per_channel=False, is_normed=True),
    "gated delta rule of given lengths": lambda device: delta(
        device, decay_per_channel=False, is_normed=False
    ),
    "kimi delta attention": lambda device: delta(device, decay_per_channel=True, is_normed=True),
    "lightning attention": lightning,
    "mamba-2": mamba2,
    "mamba": mamba,
}


class Rank:
    """Runs steps of one recurrent layer.

    Args:
        ours: Module of recurrences of a device.
        step, cache: Of that device. The cache has 16 state slots.
    """

    def __init__(self, kind: Kind, ours: Any, step: Step, cache: PagedCache) -> None:
        self.kind, self.ours, self.step, self.cache = kind, ours, step, cache
        self.step.has_states = True
        self.call = MixerCall(0)
        self.call.pages = SimpleNamespace(step=step, tails=cache.tails, states=cache.states)

    def run(
        self,
        pieces: Sequence[Sequence[StatePiece]],
        inputs: Sequence[tuple[Tensor, ...]],
        num_decodes: int = 0,
        starts: Sequence[int] = (),
    ) -> list[Tensor]:
        """Return the outputs of each sequence's tokens. Sequences are concatenated, and padding follows them all.

        `starts` are the positions of their first tokens, 0 by default.
        """
        at = self.kind.time_at
        spans = [
            Span(start, sum(each.length for each in own), [0] * 4, own)
            for start, own in zip_longest(starts, pieces, fillvalue=0)
        ]
        self.step.fill(spans, num_decodes)
        self.step.inputs([0] * self.step.num_tokens, [])
        rows = self.step.num_padded - self.step.num_tokens
        padding = self.kind.inputs(99, rows) if rows else ()
        packed = [torch.cat(each, 1) if at == 1 else torch.cat([x.transpose(1, 2) for x in each], 1).transpose(1, 2)
                  for each in zip(*inputs, *([padding] if rows else []), strict=True)]  # fmt: skip
        out = self.kind.run(self.ours, self.call, *packed)
        return list(torch.split(out, [*(each[0].shape[at] for each in inputs), rows], at))


def whole(length: int, write: int = NO_STATE) -> list[StatePiece]:
    """Return the pieces of a sequence that starts here."""
    return [StatePiece(NO_STATE, write, length)]


def check_a_batch(rank: Rank) -> None:
    """Check that each sequence of a batch gets the result of `transformers` for that sequence alone."""
    inputs = [rank.kind.inputs(10 * index, length) for index, length in enumerate(LENGTHS)]
    for found, own in zip(rank.run([whole(length) for length in LENGTHS], inputs), inputs, strict=False):
        wanted = rank.kind.oracle(*own)
        assert torch.allclose(found, wanted, rtol=2e-5, atol=2e-5), (found - wanted).abs().max()


def check_cuts(rank: Rank) -> None:
    """Check that chunks, other parts of the batch, and states saved in between change no bit."""
    at, inputs = (
        rank.kind.time_at,
        [rank.kind.inputs(10 * index, length) for index, length in enumerate(LENGTHS)],
    )
    wanted = rank.run([whole(length) for length in LENGTHS], inputs)
    longest = inputs[1]
    first, *rest = [
        tuple(x.narrow(at, begin, length) for x in longest) for begin, length in ((0, 9), (9, 1), (10, 27))
    ]
    # In a batch, alone, and with two states saved in between. The next step reads what one step wrote, at another batch index.
    parts = [rank.run([whole(5), [StatePiece(NO_STATE, 3, 9)]], [inputs[2], first])[1]]
    parts += rank.run([[StatePiece(3, 7, 1)]], [rest[0]], num_decodes=1)[:1]
    parts += rank.run([[StatePiece(7, 1, 6), StatePiece(1, 2, 10), StatePiece(2, 0, 11)]], [rest[1]])[:1]
    assert torch.equal(torch.cat(parts, at), wanted[1])
    again = tuple(x.narrow(at, 26, 11) for x in longest)
    found = rank.run([[StatePiece(2, 5, 11)]], [again])[0]
    assert torch.equal(found, wanted[1].narrow(at, 26, 11)), "from a snapshot"
    for slots in (rank.cache.tails[0], rank.cache.states[0]):
        assert torch.equal(slots[0], slots[5]), "a repeated step must leave the same state"
        assert not slots[6].any(), "a slot of another sequence was written"
