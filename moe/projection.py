"""Logits from hidden states: a draft's, or those of the last forward, which are kept so that more rows can be projected.

Rejected: one forward that returns all rows. Logits of 8,192 rows with a vocabulary of 150,000 are 5 GB.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from moe.text_part import body_of


class KeptBody:
    """Keeps the output of a model's decoder."""

    def __init__(self, net: PreTrainedModel) -> None:
        self._net, self._decoder = net, body_of(net)
        self._is_wanted = False
        self._output: Any = None
        self._decoder.register_forward_hook(self._note)

    @contextmanager
    def keeping(self, wanted: bool) -> Iterator[None]:
        """Drop what was kept; keep the output of forwards in this context if `wanted`."""
        self._is_wanted, self._output = wanted, None
        try:
            yield
        finally:
            self._is_wanted = False

    @property
    def hidden_TD(self) -> Tensor:
        """Return the decoder's output, after its final norm."""
        rows: Tensor = self._kept[0][0]
        return rows

    def logits(self, rows_R: Tensor) -> Tensor:
        """Compute the logits of rows: [R, V]."""
        return project(self._net, self._decoder, self._kept, rows_R)

    @property
    def _kept(self) -> Any:
        assert self._output is not None, "the last forward did not keep its hidden states"
        return self._output

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._is_wanted:
            self._output = output


def project(model: PreTrainedModel, body: nn.Module, decoded: Any, rows_R: Tensor) -> Tensor:
    """Compute logits of rows from the output of a model's body: [R, V] float32.

    What follows a decoder (output projection, a scaling, a cap) is the family's own code, in the forward of the whole
    model. So that forward runs, with a body that temporarily returns the given output. Rejected: calling the output
    projection directly, which would skip a family's scaling.
    """
    with _answering(body, decoded):
        # Some families check that there are hidden states for all rows of the input.
        nothing = torch.zeros(1, decoded[0].shape[1], dtype=torch.int64, device=rows_R.device)
        output: Any = model(input_ids=nothing, use_cache=False, logits_to_keep=rows_R)
    logits: Tensor = output.logits[0].float()
    return logits


@contextmanager
def _answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Make a module return `output` for every input."""
    own = vars(module).get("forward")
    module.forward = lambda *_inputs, **_options: output
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
