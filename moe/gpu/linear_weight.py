"""Linear layers' weights that a kernel of ours multiplies with on a GPU: FP8 ones, and all where rows' bits must be their own.

`transformers`' modules call `torch.nn.functional.linear(x, self.weight)`; as `moe.cpu.packed_weight` does on the CPU, the
weight answers, here with the experts' grouped product with one group. FP8 stays as the checkpoint has it, one byte a
value and a scale per 128 x 128. Plain weights come here where the engine is told to be invariant: cuBLAS takes
another kernel for another number of rows, and adds in another order.
Whatever else is asked of such a weight, it answers as a plain tensor, correct but slow.

Legend: T rows, K in features, N out features, B blocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from moe.cpu.packed_weight import ABOUT
from moe.gpu.formats import PLAIN, SCALE_BLOCK, format_of
from moe.gpu.grouped import grouped_linear
from moe.gpu.tiles import DECODE_TILE, FP8_DECODE_TILE, GroupedTile
from moe.load.quantised_weight import QuantisedWeight


class OneGroup:
    """What the grouped product is told where all rows have one weight; shared by all weights of a model."""

    def __init__(self, device: torch.device, *, is_invariant: bool) -> None:
        """With `is_invariant` the tile has the same bits for any number of rows."""
        self._device, self._is_invariant = device, is_invariant
        self._offsets: dict[int, Tensor] = {}
        self.place_1 = torch.zeros(1, dtype=torch.int32, device=device)

    def offsets(self, rows: int) -> Tensor:
        """Return [0, rows], int64; made once for each number of rows, so that a captured step finds them there."""
        if rows not in self._offsets:
            self._offsets[rows] = torch.tensor([0, rows], device=self._device)
        return self._offsets[rows]

    def tile(self, weight: Tensor) -> GroupedTile | None:
        """Return the tile of a launch; None: what the kernel takes for so many rows."""
        return steady_tile(weight) if self._is_invariant else None


def steady_tile(weight: Tensor) -> GroupedTile:
    """The tile for a weight that gives a row the same bits among any number of rows: the one for few."""
    return DECODE_TILE if format_of(weight) == PLAIN else FP8_DECODE_TILE


class DeviceWeight(Tensor):
    """[N, K], presented as of the model's type, held so or as FP8 codes beside their scales."""

    weight_1NK: Tensor
    scales_1BB: Tensor | None
    group: OneGroup

    @staticmethod
    def __new__(
        cls, weight: Tensor | QuantisedWeight, group: OneGroup, dtype: torch.dtype, device: torch.device
    ) -> "DeviceWeight":
        """Copy a weight to the device; `group` is shared by all."""
        self = Tensor._make_wrapper_subclass(
            cls, torch.Size(weight.shape), dtype=dtype, device=device, requires_grad=False
        )
        if isinstance(weight, QuantisedWeight):
            self.weight_1NK = weight.codes[None].to(device)
            self.scales_1BB = weight.block_scales(SCALE_BLOCK)[None].to(device)
        else:
            self.weight_1NK, self.scales_1BB = weight[None].to(device, dtype).contiguous(), None
        self.group = group
        return self

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer linear and embedding from what is held, the rest as a plain tensor."""
        kwargs = kwargs or {}
        if function is torch.nn.functional.linear:
            return _linear(*args, **kwargs)
        if function is torch.nn.functional.embedding:
            return _embedding(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if function in ABOUT:
                return function(*args, **kwargs)
            plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
            return function(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        """Refuse: nothing below the Python API may touch a weight that has no plain storage of its own."""
        raise AssertionError(f"{function} reached a device's weight; __torch_function__ should have answered")

    def widened(self) -> Tensor:
        """The plain weight: [N, K] of the model's type; a copy of FP8 ones."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.scales_1BB is None:
                return self.weight_1NK[0]
            codes, scales = self.weight_1NK[0].float(), self.scales_1BB[0]
            n, k = codes.shape
            wide = scales.repeat_interleave(SCALE_BLOCK, 0)[:n].repeat_interleave(SCALE_BLOCK, 1)[:, :k]
            return (codes * wide).to(self.dtype)


def _plain(value: Any) -> Any:
    return value.widened() if isinstance(value, DeviceWeight) else value


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, DeviceWeight) or input.dtype != weight.dtype:
        return torch.nn.functional.linear(*(_plain(each) for each in (input, weight, bias)))
    weight_1NK, group = weight.weight_1NK, weight.group
    _, n, k = weight_1NK.shape
    x_TK = input.reshape(-1, k).contiguous()
    rows = len(x_TK)
    out_TN = grouped_linear(
        x_TK, weight_1NK, group.offsets(rows), group.place_1, num_pairs=rows, scales_WBB=weight.scales_1BB,
        tile=group.tile(weight_1NK),
    )  # fmt: skip
    if bias is not None:
        out_TN += bias
    return out_TN.view(*input.shape[:-1], n)


def _embedding(ids: Tensor, weight: Tensor, *options: Any, **more_options: Any) -> Tensor:
    if isinstance(weight, DeviceWeight) and weight.scales_1BB is None:
        return weight.weight_1NK[0][ids]
    return torch.nn.functional.embedding(ids, _plain(weight), *options, **more_options)
