"""A weight that modules use like any other, stored in panels for the CPU kernels.

`transformers`' modules call `torch.nn.functional.linear(x, self.weight)` and `embedding(ids, self.weight)`;
`PackedWeight` answers both through `__torch_function__`, so that nn.Linear, routers and tied embeddings run on
our kernels without a line of model code replaced. Whatever else is asked of it, it answers as a plain float32
tensor, correct but slow. Rejected: swapping module classes (routers are not nn.Linear and differ by family).

Legend: T tokens (rows), K input features, N output features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from attention.cpu_tiles import LANES
from moe.cpu.linear import linear, pack, unpack
from moe.cpu.quantised_linear import pack_codes, pack_scales, quantised_linear, unpack_quantised
from moe.current_step import CurrentStep
from moe.load.quantised_weight import QuantisedWeight

CASTS = frozenset({Tensor.to, Tensor.type})
# Getters that tell about a tensor without its values; all others (T, mT, data) want them.
ABOUT = frozenset(
    getattr(Tensor, name).__get__
    for name in (
        "device", "dtype", "grad", "grad_fn", "is_cuda", "is_leaf", "is_meta", "is_sparse", "layout", "ndim",
        "requires_grad", "shape",
    )
)  # fmt: skip


class PackedWeight(Tensor):
    """[N, K], presented as float32, held as panels of float32 or bfloat16, or of FP8 codes beside their scales."""

    panels: Tensor  # [ceil(N / 16), K, 16]
    scales: Tensor | None  # [ceil(N / 16), blocks of K] float32, of FP8
    block: int  # inputs under one scale
    out_dim: int  # N
    in_dim: int  # K
    current: CurrentStep

    @staticmethod
    def __new__(cls, weight_NK: Tensor | QuantisedWeight, current: CurrentStep) -> "PackedWeight":
        """Pack a [N, K] weight; `current` step is the model's, which says how many rows of a batch are real."""
        self = Tensor._make_wrapper_subclass(
            cls,
            torch.Size(weight_NK.shape),
            dtype=torch.float32,
            device=torch.device("cpu"),
            requires_grad=False,
        )
        self.scales, self.block = None, 0
        if isinstance(weight_NK, QuantisedWeight):
            self.panels, self.scales = pack_codes(weight_NK), pack_scales(weight_NK)
            self.block = weight_NK.block
        else:
            self.panels = pack(weight_NK)
        self.out_dim, self.in_dim = weight_NK.shape
        self.current = current
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer linear and embedding with our kernels, casts to float32 with self, the rest unpacked."""
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        if function is torch.nn.functional.embedding:
            return _embedding(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if function in ABOUT:
                return function(*args, **kwargs)
            if function is Tensor.float or (function in CASTS and args[1:] == (torch.float32,)):
                return args[0]
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
            return function(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        """Refuse: nothing below the Python API may touch a weight that has no plain storage."""
        raise AssertionError(
            f"{function} reached a packed weight; __torch_function__ should have unpacked it"
        )

    def unpacked(self) -> Tensor:
        """The plain weight: [N, K] float32, a copy."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.scales is not None:
                return unpack_quantised(self.panels, self.scales, self.shape[0], self.block).dequantised()
            return unpack(self.panels, self.shape[0]).float()


def _plain(value: Any) -> Any:
    return value.unpacked() if isinstance(value, PackedWeight) else value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Called some ten times per layer: what a packed weight says of itself are plain attributes here, because its
    # tensor properties answer through __torch_function__.
    if (
        not isinstance(weight, PackedWeight)
        or input.dtype is not torch.float32
        or input.shape[-1:] != (weight.in_dim,)
    ):
        plain = [_plain(value) for value in (input, weight, bias)]
        return torch.nn.functional.linear(*plain)  # answers, or refuses, as torch does
    n, step, panels = weight.out_dim, weight.current.step, weight.panels
    x_TK = input.reshape(-1, weight.in_dim)
    rows = x_TK.shape[0]
    # Padding is not computed. The packed batch comes as [T, K] or [1, T, K]; what has more dimensions is
    # something else that may happen to have as many rows (the latents that MLA expands).
    real = step.num_tokens if rows == step.num_padded and input.dim() <= 3 else rows
    width = panels.shape[0] * LANES
    out_TN = torch.empty(rows, width) if real == rows else torch.zeros(rows, width)
    if real < rows:
        x_TK = x_TK[:real]
    if x_TK.stride(1) != 1:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    if weight.scales is None:
        linear(x_TK, panels, out_TN, parallel=step.is_parallel)
    else:
        quantised_linear(x_TK, panels, weight.scales, weight.block, out_TN, parallel=step.is_parallel)
    if width != n:
        out_TN = out_TN[:, :n].contiguous()
    if bias is not None:
        out_TN += bias
    return out_TN.view(*input.shape[:-1], n)


def _embedding(ids: Tensor, weight: PackedWeight, *options: Any, **more_options: Any) -> Tensor:
    if weight.scales is not None:  # no format that is served quantises embeddings; correct but slow
        return torch.nn.functional.embedding(ids, weight.unpacked(), *options, **more_options)
    with torch._C.DisableTorchFunctionSubclass():
        flat = ids.reshape(-1)
        rows_TK = weight.panels[flat // LANES, :, flat % LANES]
        return rows_TK.float().view(*ids.shape, weight.shape[1])
