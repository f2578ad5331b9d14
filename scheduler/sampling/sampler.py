"""What makes tokens of logits for the runner, wherever the logits are: `scheduler.sampling.gpu.sampler` is the other one.

Legend: R rows that are sampled from, C rows of a prompt, V vocabulary.
"""

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from scheduler.policy.request import Logprobs
from scheduler.policy.sequence import Sequence
from scheduler.sampling.logprobs import prompt_logprobs
from scheduler.sampling.sampling import Sampled, sample


class Sampler(Protocol):
    """Chooses tokens. Returns when all that the step launched is done, whether or not there is a row to sample."""

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """Choose a token per row.

        Args:
            logits_RV: [R, V] float32, where the model leaves them; may be changed in place.
            sequences: R, as they stand before this token.
        """
        ...

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """Say how likely each row found the token that follows it; see `scheduler.sampling.logprobs.prompt_logprobs`."""
        ...


class HostSampler:
    """Samples on the CPU."""

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """See `Sampler`."""
        return sample(logits_RV.cpu(), sequences)

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """See `Sampler`."""
        return prompt_logprobs(logits_CV.cpu(), next_ids, num_top)
