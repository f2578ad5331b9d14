"""Compare the log-probabilities of two samplers."""

import numpy as np

from scheduler.policy.request import Logprobs


def close(ours: Logprobs | None, wanted: Logprobs | None) -> bool:
    """Return whether two are equal up to the rounding of exponentials and their sum: a few times 1e-8 of a logarithm."""
    if ours is None or wanted is None:
        return ours is wanted
    numbers = [
        np.array([each.logprob, *each.top_logprobs], np.float64) for each in (ours, wanted)
    ]  # float32 except the first: an ulp at 100 is 8e-6
    return (ours.token_id, ours.top_ids, ours.rank) == (
        wanted.token_id,
        wanted.top_ids,
        wanted.rank,
    ) and bool(np.allclose(*numbers, rtol=2e-7, atol=1e-6))
