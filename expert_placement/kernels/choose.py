"""Which copy serves a choice: compiled, in one pass to count and one to assign.

Legend: T tokens, K choices, P = T x K pairs, E experts, C copies of all experts of a layer.
"""

import numpy as np

from expert_placement.kernels.compiled import entry, inner


@inner
def _count(expert_P: np.ndarray, num_experts: int) -> np.ndarray:
    num_E = np.zeros(num_experts, np.int64)
    for pair in range(expert_P.shape[0]):
        if expert_P[pair] >= 0:
            num_E[expert_P[pair]] += 1
    return num_E


@entry
def choose_slots(
    expert_P: np.ndarray,
    first_E: np.ndarray,
    slot_C: np.ndarray,
    until_C: np.ndarray,
    start_E: np.ndarray,
    total_E: np.ndarray,
    slot_P: np.ndarray,
) -> None:
    """Write the slot of each pair's expert into slot_P; -1 stays -1.

    Args:
        expert_P: [P] integers, -1 to E - 1.
        first_E: [E + 1] int64: expert e's copies are first_E[e] to first_E[e + 1].
        slot_C: [C] int64 slots. until_C: [C] float64, the shares summed up within each expert, the last one 1.
        start_E: [E] float64: the place of this batch's first pair of each expert on the grid.
        total_E: [E] int64, the points of each expert's grid; [0]: as many as the batch has pairs.
    """
    num_E = total_E if total_E.shape[0] else _count(expert_P, start_E.shape[0])
    seen_E = np.zeros(start_E.shape[0], np.int64)
    for pair in range(expert_P.shape[0]):
        expert = expert_P[pair]
        if expert < 0:
            slot_P[pair] = -1
            continue
        copy, last = first_E[expert], first_E[expert + 1] - 1
        if copy < last:
            point = (seen_E[expert] + start_E[expert]) / num_E[expert]
            while copy < last and point >= until_C[copy]:
                copy += 1
            seen_E[expert] += 1
        slot_P[pair] = slot_C[copy]
