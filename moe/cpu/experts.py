"""The experts organ: what `transformers`' experts modules call instead of looping over their own weights.

One call per MoE layer and step: logical experts to physical slots, dispatch, grouped GEMM over this rank's
slots, combine. Gate functions are the modules' own (`_apply_gate`); the common one, silu(gate) * up, has a fused
kernel. The module is given its `ExpertLayer` when the model is built; nothing is looked up globally.

Legend: T tokens, D hidden dim, K choices per token, S slots of this rank, P pairs (row, choice) on this rank,
I intermediate dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from attention.cpu_tiles import LANES
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import Mode
from kvcache.step import ROW_MULTIPLE, Step
from moe.cpu.linear import grouped_linear, pack, silu_and_mul
from moe.cpu.quantised_linear import grouped_quantised_linear, pack_codes, pack_scales
from moe.current_step import CurrentStep
from moe.load.quantised_weight import QuantisedWeight, inputs_per_code
from moe.load_counts import LayerCounts
from moe.replicas import Route

NAME = "wideep_experts"
SAMPLE_ROWS = 8


@dataclass
class SlotTensors:
    """One named weight of all slots of a layer, packed, with its scales where it is quantised and its optional bias."""

    out_dim: int
    packed_S: Tensor  # [S, panels, in_dim, 16]: where slots are at first, and what one's shape and dtype is
    bias_SN: Tensor | None  # [S, out_dim] float32
    scales_S: Tensor | None = None  # [S, ...] as `pack_scales` has them; packed_S are codes then
    block: int = 0  # inputs under one scale
    rows: list[Tensor] = field(init=False)  # [panels, in_dim, 16] of each slot, where it is now
    scales: list[Tensor] = field(init=False)  # of each slot, likewise; empty where nothing is quantised
    address_S: np.ndarray = field(init=False)  # [S] int64: of the rows, for the kernels
    scale_address_S: np.ndarray = field(init=False)  # [S] int64: of the scales

    def __post_init__(self) -> None:
        """Point at the slots."""
        self.rows = list(self.packed_S.unbind(0))
        self.scales = [] if self.scales_S is None else list(self.scales_S.unbind(0))
        self.address_S = _addresses(self.rows)
        self.scale_address_S = _addresses(self.scales)

    @classmethod
    def empty(cls, slots: int, out_dim: int, in_dim: int, dtype: torch.dtype) -> "SlotTensors":
        """Reserve zeroed slots."""
        panels = -(-out_dim // LANES)
        return cls(out_dim, torch.zeros(slots, panels, in_dim, LANES, dtype=dtype), None)

    @classmethod
    def like(cls, weight_NK: Tensor | QuantisedWeight, slots: int) -> "SlotTensors":
        """Reserve zeroed slots for weights such as this one [out_dim, in_dim]."""
        out_dim, in_dim = weight_NK.shape
        if isinstance(weight_NK, Tensor):
            return cls.empty(slots, out_dim, in_dim, weight_NK.dtype)
        codes, scales = pack_codes(weight_NK), pack_scales(weight_NK)
        return cls(
            out_dim,
            codes.new_zeros(slots, *codes.shape),
            None,
            scales.new_zeros(slots, *scales.shape),
            weight_NK.block,
        )

    @property
    def in_dim(self) -> int:
        """Input features."""
        return self.packed_S.shape[2] * inputs_per_code(self.packed_S.dtype)

    def put(self, slot: int, weight_NK: Tensor | QuantisedWeight) -> None:
        """Store one expert's weight [out_dim, in_dim] in a slot."""
        if isinstance(weight_NK, QuantisedWeight):
            self.rows[slot].copy_(pack_codes(weight_NK))
            self.scales[slot].copy_(pack_scales(weight_NK))
        else:
            self.rows[slot].copy_(pack(weight_NK.to(self.packed_S.dtype)))

    def at(self, slot: int) -> "SlotTensors":
        """One slot by itself; its memory is the slot's."""
        bias = None if self.bias_SN is None else self.bias_SN[slot : slot + 1]
        scales = self.scales[slot][None] if self.scales else None
        return SlotTensors(self.out_dim, self.rows[slot][None], bias, scales, self.block)

    def spare(self) -> "SlotTensors":
        """Reserve one zeroed slot outside the layer, of the layer's kind."""
        bias = None if self.bias_SN is None else torch.zeros_like(self.bias_SN[:1])
        scales = None if self.scales_S is None else torch.zeros_like(self.scales_S[:1])
        return SlotTensors(self.out_dim, torch.zeros_like(self.packed_S[:1]), bias, scales, self.block)

    def exchange(self, slot: int, new: "SlotTensors") -> "SlotTensors":
        """Put another memory in a slot's place, without copying weights; returns the old one, its bias undefined."""
        old, self.rows[slot] = self.rows[slot], new.rows[0]
        self.address_S[slot] = new.address_S[0]
        old_scales = None
        if self.scales:
            old_scales, self.scales[slot] = self.scales[slot][None], new.scales[0]
            self.scale_address_S[slot] = new.scale_address_S[0]
        if self.bias_SN is not None and new.bias_SN is not None:
            self.bias_SN[slot] = new.bias_SN[0]  # a few KB, and then `apply` needs no gathering
        return SlotTensors(self.out_dim, old[None], new.bias_SN, old_scales, self.block)

    def rearrange(self, parts: Sequence["SlotTensors"]) -> None:
        """Serve single slots in this order in place of all so far, more or fewer, without copying weights."""
        self.rows = [part.rows[0] for part in parts]
        self.scales = [part.scales[0] for part in parts if part.scales]
        self.address_S, self.scale_address_S = _addresses(self.rows), _addresses(self.scales)
        if self.bias_SN is not None:
            self.bias_SN = torch.cat([part.bias_SN for part in parts if part.bias_SN is not None])

    def tensors(self) -> dict[str, Tensor]:
        """What belongs to the first slot, by name: "" is the weight; views."""
        named = {"": self.rows[0]}
        if self.scales:
            named["scales"] = self.scales[0]
        if self.bias_SN is not None:
            named["bias"] = self.bias_SN[0]
        return named

    def apply(self, x_PK: Tensor, slot_offsets: Tensor, *, parallel: bool) -> Tensor:
        """Multiply rows sorted by slot; returns [P, out_dim] float32, contiguous."""
        if self.scales:
            out_PN = grouped_quantised_linear(
                x_PK,
                self.rows[0],
                self.address_S,
                self.scale_address_S,
                slot_offsets,
                block=self.block,
                parallel=parallel,
            )
        else:
            out_PN = grouped_linear(
                x_PK, self.packed_S, slot_offsets, parallel=parallel, address_S=self.address_S
            )
        if out_PN.shape[1] != self.out_dim:
            out_PN = out_PN[:, : self.out_dim].contiguous()
        if self.bias_SN is not None:
            out_PN += torch.repeat_interleave(
                self.bias_SN, slot_offsets.diff(), dim=0, output_size=len(out_PN)
            )
        return out_PN

    @property
    def slot_bytes(self) -> int:
        """Bytes of one expert's weight, scales and bias, the padding of panels left out."""
        weight = self.out_dim * self.packed_S.shape[2] * self.packed_S.element_size()
        scales = self.scales[0].numel() * self.scales[0].element_size() if self.scales else 0
        return weight + scales + (0 if self.bias_SN is None else self.out_dim * 4)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved: all slots, empty ones and the padding of panels included."""
        tensors = [self.rows[0], *self.scales[:1], *([] if self.bias_SN is None else [self.bias_SN[0]])]
        return len(self.rows) * sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _addresses(tensors: list[Tensor]) -> np.ndarray:
    return np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)


@dataclass
class ExpertLayer:
    """This rank's slots of one MoE layer, and the way from logical experts to everybody's slots."""

    up: SlotTensors  # gate_up_proj, or up_proj where the family has no gate
    down: SlotTensors
    route: Route  # of the placement that serves
    num_experts: int
    dispatcher: TokenDispatcher
    current: CurrentStep
    counts: LayerCounts | None = None  # of the choices of this rank's tokens; None: not counted
    sample_TD: Tensor | None = None  # some real rows, which try out experts that arrive

    @property
    def step(self) -> Step:
        """The step that runs."""
        return self.current.step

    def run(self, module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Serve one layer; collective. Rows past the step's tokens are padding and come back as zero.

        Args:
            module: the experts module, for its gate function.
            hidden_TD: [T, D] float32.
            ids_TK: [T, K] int64 logical experts. weights_TK: [T, K], routing weights.

        Returns:
            [T, D] float32, new.
        """
        rows = self.step.num_tokens
        if self.sample_TD is None and rows:
            self.sample_TD = hidden_TD[: min(rows, SAMPLE_ROWS)].clone()
        ids_TK = ids_TK[:rows].contiguous()
        mode = Mode(self.step.agreed_tokens)
        slots_TK = self.route.slots(ids_TK)
        sent = self.dispatcher.dispatch(hidden_TD[:rows].contiguous(), slots_TK, mode)
        begun_ns = perf_counter_ns()
        y_PD = self.compute(module, sent.x_NH[sent.row_P], sent.slot_offsets, parallel=self.step.is_parallel)
        if self.counts is not None:
            self.counts.experts_ns += perf_counter_ns() - begun_ns
            self.counts.add(ids_TK, slots_TK, self.step.num_decodes)
        out_TD = torch.empty(hidden_TD.shape, dtype=hidden_TD.dtype)
        out_TD[rows:] = 0.0
        self.dispatcher.combine(y_PD, weights_TK[:rows].float(), sent, out=out_TD[:rows])
        return out_TD

    def compute(self, module: Any, x_PD: Tensor, slot_offsets: Tensor, *, parallel: bool) -> Tensor:
        """Apply every slot's expert to its own rows; local. Returns [P, D] float32, new."""
        raised_PN = self.up.apply(x_PD, slot_offsets, parallel=parallel)
        gate = getattr(module._apply_gate, "__func__", None)
        if not module.has_gate:
            lowered_PI = _on_full_vectors(module.act_fn, raised_PN)
        elif (
            gate is _default_apply_gate
            and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
            and self.up.out_dim % (2 * LANES) == 0
        ):
            lowered_PI = silu_and_mul(raised_PN, parallel=parallel)
        else:
            lowered_PI = _on_full_vectors(module._apply_gate, raised_PN)
        return self.down.apply(lowered_PI, slot_offsets, parallel=parallel)

    def try_out(self, module: Any, up: SlotTensors, down: SlotTensors, x_TD: Tensor) -> Tensor:
        """Run rows through an expert that need not serve, on one thread, beside steps: [T, D] float32, new."""
        alone = ExpertLayer(up, down, self.route, self.num_experts, self.dispatcher, self.current)
        return alone.compute(module, x_TD.contiguous(), torch.tensor([0, len(x_TD)]), parallel=False)


def _on_full_vectors(function: Callable[[Tensor], Tensor], x_PN: Tensor) -> Tensor:
    """Apply an elementwise function with rows padded, so that no row falls in a scalar tail (see `Step.fill`)."""
    missing = -len(x_PN) % ROW_MULTIPLE
    padded = torch.cat((x_PN, x_PN.new_zeros(missing, x_PN.shape[1]))) if missing else x_PN
    return function(padded)[: len(x_PN)].contiguous()


def serve_experts(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Answer an experts module's forward with its `ExpertLayer`."""
    layer: ExpertLayer = module.expert_layer
    return layer.run(module, hidden_TD, ids_TK, weights_TK)


def register() -> None:
    """Make the organ known to `transformers` under `NAME`; may be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, serve_experts)
