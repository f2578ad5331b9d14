"""Linear layers of one input as one product: the weights of queries, keys and values in one matrix.

The layers keep their weights, which become views of the matrix, so every other reader finds them as before. Quantised weights
stay apart: each layer then runs by itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe.kernel_weight import KernelWeight


class Products:
    """The products of some linear layers with the same rows."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Use the layers as they are, until `pack`."""
        self._layers = list(layers)
        self._sizes = [layer.out_features for layer in layers]
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self._layers[0].in_features

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return each layer's rows [..., N]; rows have gaps between them if the layers are packed."""
        if self._weight is None:
            return [layer(x) for layer in self._layers]
        return torch.split(linear(x, self._weight, self._bias), self._sizes, dim=-1)

    @torch.no_grad()
    def pack(self) -> None:
        """Copy the weights into one matrix, if they are plain, and let the layers' parameters be views of it.

        Memory for one more copy of these weights is needed while this runs; on a GPU it is given back at once.
        """
        if not _are_alike(self._layers):
            return
        self._weight = self._joined()
        if self._weight is None:
            return
        biases: list[Tensor] = [layer.bias for layer in self._layers if layer.bias is not None]
        if biases:
            self._bias = torch.cat(biases)
            for layer, part in zip(self._layers, torch.split(self._bias, self._sizes), strict=True):
                layer.bias = nn.Parameter(part, requires_grad=False)
        if self._weight.is_cuda:
            torch.cuda.empty_cache()

    def _joined(self) -> Tensor | None:
        """Return the matrix of all weights, which are views of it from now on, or None if they have to stay apart."""
        weights = [layer.weight for layer in self._layers]
        if isinstance(weights[0], KernelWeight):
            return weights[0].joined(weights[1:])
        matrix = torch.cat(weights)
        for layer, rows in zip(self._layers, torch.split(matrix, self._sizes), strict=True):
            layer.weight = nn.Parameter(rows, requires_grad=False)
        return matrix


def _are_alike(layers: Sequence[nn.Linear]) -> bool:
    """Return whether all are plain layers with weights of one type, all with a bias or all without."""
    kinds = {
        (type(layer), type(layer.weight), layer.weight.dtype, layer.weight.device, layer.bias is None)
        for layer in layers
    }
    layer, weight = next(iter(kinds))[:2]
    return (
        len(kinds) == 1
        and layer is nn.Linear
        and (weight is nn.Parameter or issubclass(weight, KernelWeight))
    )
