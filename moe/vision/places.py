"""Put the rows of images into a model's forward: in the places of embedded tokens, and after its first layers.

A family's image tower gives rows for the embedded tokens. Some families also add rows to the hidden values after each of the
first layers (deepstack, arXiv 2406.04334). Both happen in hooks, which exist only during steps with such rows, so every
family's own forward stays as it is, and steps without images cost nothing.
Rejected: the keywords that the families' decoders have for this. They differ, and most need a mask of the whole batch.

Legend: T rows of the step, D hidden size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcache.images import PlacedRows
from moe.text_part import decoder_layers


class ImagePlaces:
    """The places of a model that take rows of images."""

    def __init__(self, net: PreTrainedModel) -> None:
        self._embeddings: nn.Module = net.get_input_embeddings()
        self._layers = decoder_layers(net)
        # Gemma 4: a second embedding, of which the rows of images take the padding token's.
        self._more_embeddings: nn.Module | None = getattr(net.get_decoder(), "embed_tokens_per_layer", None)
        # Whether positions count time, height and width (multimodal rotary embeddings), in `transformers`' names.
        marks = ("get_rope_index", "mrope_section")
        self.have_axes = all(any(hasattr(module, mark) for module in net.modules()) for mark in marks)
        self._pad_id = getattr(net.config.get_text_config(decoder=True), "pad_token_id", None) or 0

    @contextmanager
    def filled(self, images: Sequence[PlacedRows]) -> Iterator[None]:
        """Let forwards in this context take these rows. Their places count the step's rows."""
        hooks: list[Any] = []
        if images:
            hooks.append(self._embeddings.register_forward_hook(partial(_replace, images)))
        if images and self._more_embeddings is not None:
            padded = partial(_pad, images, self._pad_id)
            hooks.append(self._more_embeddings.register_forward_pre_hook(padded))
        for depth in range(1, max((len(placed.rows) for placed in images), default=0)):
            layer = self._layers[depth - 1]
            hooks.append(layer.register_forward_hook(partial(_add, images, depth)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _replace(
    images: Sequence[PlacedRows], _embeddings: nn.Module, _inputs: Any, embedded_1TD: Tensor
) -> None:
    for placed in images:
        rows_ND = torch.from_numpy(placed.rows[0])
        embedded_1TD[0, placed.place : placed.place + len(rows_ND)] = rows_ND.to(embedded_1TD)


def _pad(
    images: Sequence[PlacedRows], pad_id: int, _embeddings: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    token_1T = inputs[0].clone()
    for placed in images:
        token_1T[0, placed.place : placed.place + placed.rows.shape[1]] = pad_id
    return token_1T, *inputs[1:]


def _add(images: Sequence[PlacedRows], depth: int, _layer: nn.Module, _inputs: Any, output: Any) -> None:
    hidden_1TD: Tensor = output if isinstance(output, Tensor) else output[0]
    for placed in images:
        if depth < len(placed.rows):
            rows_ND = torch.from_numpy(placed.rows[depth])
            hidden_1TD[0, placed.place : placed.place + len(rows_ND)] += rows_ND.to(hidden_1TD)
