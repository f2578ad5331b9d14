"""Recurrences on CPU, as functions for mixers and as rows of programs. The kernels are in `attention.recurrences.cpu_kernels`.

Legend: as in `attention.recurrences.mixers`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention.recurrences.cpu_kernels import CONVOLVE, DELTA_RULE, SCAN_CHANNELS, SCAN_HEADS
from attention.recurrences.mixers import (
    ChannelScan,
    Convolution,
    DeltaRule,
    HeadScan,
    MixerCall,
    Recurrences,
    floats_of,
    taps_of,
)
from dispatch.compiled.native import bits_of
from dispatch.compiled.team import program_of, run
from kvcache.step import Step

_VALUES_PER_NS = 4  # approximate rate of one thread, in values of the state


def _of_step(slots: Tensor, step: Step) -> list[int]:
    """Return the words that all recurrences read: the location of the states, and the batch."""
    stride = slots.stride(0) * 4
    return [
        slots.data_ptr(), stride, step.piece_P3.data_ptr(), step.piece_start_S.data_ptr(), step.query_start_S.data_ptr(),
        step.facts[4:].data_ptr(),
    ]  # fmt: skip


def _rows(x: Tensor, width: int) -> Tensor:
    """Return rows with contiguous values: [T, width], a view if possible."""
    rows = x.reshape(x.shape[0], width) if x.dim() > 2 else x
    return rows if rows.stride(1) == 1 and rows.dtype is torch.float32 else rows.float().contiguous()


class Side(NamedTuple):
    """Location of queries, keys or values: address, bytes from one row to the next, number of heads."""

    address: int
    stride: int
    heads: int


def convolve_row(
    x: int, x_stride: int, out: int, taps_KC: Tensor, bias_C: Tensor | None, tails: Tensor, step: Step, *, has_silu: bool
) -> list[int]:  # fmt: skip
    """Return one row of a program that runs `convolve`.

    Args:
        x: Address of rows of C float32, `x_stride` bytes from one to the next. out: address of [T, C] float32.
        taps_KC: [taps, C] float32.
    """
    taps, channels = taps_KC.shape
    bias = 0 if bias_C is None else bias_C.data_ptr()
    return CONVOLVE.row(
        x, x_stride, out, taps_KC.data_ptr(), bias, taps, channels, int(has_silu), *_of_step(tails, step)
    )


def delta_row(
    query: Side, key: Side, value: Side, decay: int, rate: int, states: Tensor, out: int, step: Step, *, decay_dim: int,
    mode: int,
) -> list[int]:  # fmt: skip
    """Return one row of a program that runs `delta_rule`.

    Args:
        decay: Address of [T, H, decay_dim] float32. rate: address of [T, H].
        states: [Z, H, K, V]. out: address of [T, H, V].
        mode: See `DeltaRule`.
    """
    _, heads, key_dim, value_dim = states.shape
    assert value.heads == heads, f"values of {value.heads} heads, states of {heads}"
    return DELTA_RULE.row(
        query.address, query.stride, key.address, key.stride, value.address, value.stride, decay, rate, out, key.heads,
        heads, key_dim, value_dim, decay_dim, mode, *_of_step(states, step),
    )  # fmt: skip


def convolve(call: MixerCall, convolution: Convolution) -> Tensor:
    """Run a convolution. The output is a view of [T, C]."""
    step, tails = call.pages.step, call.pages.tails[call.layer]
    channels, taps = convolution.weight.shape
    weight_KC, bias_C = taps_of(call, convolution)
    x_TC = _rows(convolution.x[0].t(), channels)
    out_TC = torch.zeros(x_TC.shape[0], channels)
    row = convolve_row(
        x_TC.data_ptr(), x_TC.stride(0) * 4, out_TC.data_ptr(), weight_KC, bias_C, tails, step,
        has_silu=convolution.has_silu,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * channels * taps)
    return out_TC.t()[None]


def delta_rule(call: MixerCall, rule: DeltaRule) -> Tensor:
    """Run a delta rule."""
    step, states = call.pages.step, call.pages.states[call.layer]
    tokens = rule.key.shape[1]
    heads, key_dim, value_dim = rule.state
    rows = [_rows(each[0], each.shape[2] * each.shape[3]) for each in (rule.query, rule.key, rule.value)]
    decay_dim = 1 if rule.decay.dim() == 3 else key_dim
    decay, rate = _rows(rule.decay[0], heads * decay_dim).contiguous(), rule.rate[0].float().contiguous()
    out_THV = torch.zeros(tokens, heads, value_dim)
    query, key, value = (Side(each.data_ptr(), each.stride(0) * 4, each.shape[1] // dim)
                         for each, dim in zip(rows, (key_dim, key_dim, value_dim), strict=True))  # fmt: skip
    row = delta_row(
        query, key, value, decay.data_ptr(), rate.data_ptr(), states, out_THV.data_ptr(), step,
        decay_dim=decay_dim, mode=rule.mode,
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * heads * key_dim * value_dim // _VALUES_PER_NS)
    return out_THV[None]


def scan_heads(call: MixerCall, scan: HeadScan) -> Tensor:
    """Run Mamba-2's scan."""
    step, states = call.pages.step, call.pages.states[call.layer]
    tokens, heads, head_dim = scan.x.shape[1:]
    groups, state_dim = scan.write.shape[2:]
    x, b, c = (_rows(rows[0], rows.shape[2] * rows.shape[3]) for rows in (scan.x, scan.write, scan.read))
    time = _rows(scan.dt[0], heads)
    rate_H, skip_H, bias_H = floats_of(scan.rate_H, scan.skip_H, scan.bias_H)
    shape = torch.tensor([heads, head_dim, groups, state_dim])
    out_THP = torch.zeros(tokens, heads, head_dim)
    row = SCAN_HEADS.row(
        x.data_ptr(), x.stride(0) * 4, time.data_ptr(), time.stride(0) * 4, b.data_ptr(), b.stride(0) * 4, c.data_ptr(),
        c.stride(0) * 4, _address(rate_H), _address(skip_H), _address(bias_H), int(scan.has_softplus),
        bits_of(scan.limits[0]), bits_of(scan.limits[1]), out_THP.data_ptr(), shape.data_ptr(), *_of_step(states, step),
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * heads * head_dim * state_dim // _VALUES_PER_NS)
    return out_THP[None]


def scan_channels(call: MixerCall, scan: ChannelScan) -> Tensor:
    """Run Mamba's selective scan. The output is a view of [T, C]."""
    step, states = call.pages.step, call.pages.states[call.layer]
    channels, state_dim = scan.rate_CN.shape
    if "rates" not in call.kept:
        call.kept["rates"] = scan.rate_CN.float().t().contiguous()
    x, b, c = (
        _rows(each[0].t(), width)
        for each, width in ((scan.x, channels), (scan.write, state_dim), (scan.read, state_dim))
    )
    time = scan.dt[0].t().float().contiguous()
    gate = None if scan.gate is None else _rows(scan.gate[0].t(), channels)
    skip, bias = floats_of(scan.skip_C, scan.bias_C)
    out_TC = torch.zeros(x.shape[0], channels)
    row = SCAN_CHANNELS.row(
        x.data_ptr(), x.stride(0) * 4, time.data_ptr(), b.data_ptr(), b.stride(0) * 4, c.data_ptr(), c.stride(0) * 4,
        call.kept["rates"].data_ptr(), _address(skip), _address(gate), 0 if gate is None else gate.stride(0) * 4,
        _address(bias), int(scan.has_softplus), out_TC.data_ptr(), channels, state_dim, *_of_step(states, step),
    )  # fmt: skip
    run(program_of([row]), step.team, step.num_tokens * channels * state_dim)
    return out_TC.t()[None]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


RECURRENCES: Recurrences = {
    Convolution: convolve,
    DeltaRule: delta_rule,
    HeadScan: scan_heads,
    ChannelScan: scan_channels,
}
