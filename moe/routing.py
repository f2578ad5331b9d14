"""Rules by which a family's router chooses experts. `moe.adopt.routers` finds them; the kernels of both devices follow them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Routing rules of a family."""

    choices: int
    is_sigmoid: bool = False  # scores are sigmoids; otherwise a softmax over all experts
    softmax_after: bool = False  # weights are a softmax over the chosen logits (gpt-oss)
    normalise: bool = False  # weights are divided by their sum
    scale: float = 1.0  # weights are multiplied by this
    groups: int = 1
    groups_chosen: int = 1  # a group's score is the sum of its two best scores
    best_of_group: bool = False  # a group's score is its best score (DeepSeek-V2)
