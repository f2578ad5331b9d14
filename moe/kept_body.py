"""A model's hidden states, kept after a forward, so that logits of many rows can be computed a few at a time.

What a family does after its decoder (the output projection, a scaling, a cap) is its own code, in the forward of
the whole model. So that code is run again, with the decoder replaced for the moment by one that returns what it
returned before. Rejected: calling the output projection ourselves, which would miss a family's scaling, and
asking the one forward for all rows: logits of 8,192 rows over 150,000 tokens are 5 GB.

Legend: T tokens (padded rows), R rows whose logits are wanted, V vocabulary.
"""

import threading
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class _Kept(threading.local):
    """What one thread's last forward gave: another may run the other half of the step."""

    is_wanted = False
    output: Any = None


class KeptBody:
    """Watches one model's decoder."""

    def __init__(self, net: PreTrainedModel) -> None:
        self._net = net
        self._name = net.base_model_prefix
        self._kept = _Kept()
        getattr(net, self._name).register_forward_hook(self._note)

    def keep(self, wanted: bool) -> None:
        """Forget what was kept; say whether to keep what the next forward gives."""
        self._kept.is_wanted, self._kept.output = wanted, None

    def logits(self, rows_R: Tensor) -> Tensor:
        """Compute rows' logits: [R, V]."""
        assert self._kept.output is not None, "the last forward was not asked to keep its hidden states"
        decoder = getattr(self._net, self._name)
        setattr(self._net, self._name, _Replay(self._kept.output))
        try:
            nothing = torch.zeros(1, 1, dtype=torch.int64, device=rows_R.device)
            output: Any = self._net(input_ids=nothing, use_cache=False, logits_to_keep=rows_R)
        finally:
            setattr(self._net, self._name, decoder)
        logits: Tensor = output.logits[0].float()
        return logits

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._kept.is_wanted:
            self._kept.output = output


class _Replay(nn.Module):
    """Gives the same output whatever it is asked."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *_inputs: Any, **_options: Any) -> Any:
        """Return it."""
        return self._output
