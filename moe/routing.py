"""How a family's router chooses experts: what `moe.adopt.routers` finds out, and the kernels of both devices follow."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a family chooses."""

    choices: int
    is_sigmoid: bool = False  # scores are sigmoids, else a softmax over all experts
    softmax_after: bool = False  # weights are a softmax over the chosen logits (gpt-oss)
    normalise: bool = False  # weights are divided by their sum
    scale: float = 1.0  # and multiplied by this
    groups: int = 1
    groups_chosen: int = 1  # a group's score is the sum of its two best
    best_of_group: bool = False  # or its best alone (DeepSeek-V2)
