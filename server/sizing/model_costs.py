"""What a model costs to run, counted once: numbers, bytes and features of each kind of layer. No torch.

`read_model` counts them off a model on the meta device; `roofline` and simulators make seconds of them. A *weight* is a
number that every row is multiplied with (two operations); a *feature* is a number that enters or leaves such a product,
which some kernel has to read or write.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class LayerCosts(NamedTuple):
    """One layer.

    What a rank computes for its own rows (projections, dense and shared experts, the router), the routed experts, and
    what a row's attention reads of its context.
    """

    own_weights: int
    own_bytes: int  # that these weights take
    own_features: int  # per row
    num_experts: int  # routed; 0: the layer has none
    top_k: int  # experts of a row
    expert_weights: int  # of one expert
    expert_bytes: int
    expert_features: int  # per row and expert
    attended_flops: int  # per row and attended token, as decodes compute it
    prefill_flops: int  # likewise, as prompts do: latents are expanded to heads first
    cached_numbers: int  # per token of context that attention reads
    kv_heads: int  # that these are of; 1 for latents
    index_numbers: int  # per token of context that a sparse index reads
    reach: int  # tokens that a row attends to at most; 0: all
    state_bytes: int  # that a recurrence keeps per sequence


class Layers(NamedTuple):
    """Layers that are alike."""

    num: int
    each: LayerCosts


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model.

    Attributes:
        name: its model type.
        hidden_dim: numbers of a row that travels to experts.
        layers: all of its layers, alike ones together.
        own_kind, expert_kind: what weights are stored as: bfloat16, fp8, mxfp4, ...
        head_weights, head_bytes: of the output projection.
        shared_bytes: all that every rank has, embeddings included.
    """

    name: str
    hidden_dim: int
    layers: tuple[Layers, ...]
    own_kind: str
    expert_kind: str
    head_weights: int
    head_bytes: int
    shared_bytes: int

    @property
    def num_expert_layers(self) -> int:
        """Layers that have routed experts."""
        return sum(layers.num for layers in self.layers if layers.each.num_experts)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has any."""
        return max(layers.each.num_experts for layers in self.layers)

    @property
    def top_k(self) -> int:
        """Experts of a row."""
        return max(layers.each.top_k for layers in self.layers)

    @property
    def all_experts_bytes(self) -> int:
        """Every expert of every layer, once."""
        return sum(count * each.num_experts * each.expert_bytes for count, each in self.layers)

    @property
    def active_weights(self) -> int:
        """Weights that one token is multiplied with, the output projection included."""
        per_layer = sum(
            count * (each.own_weights + each.top_k * each.expert_weights) for count, each in self.layers
        )
        return per_layer + self.head_weights

    @property
    def total_weights(self) -> int:
        """Weights of all layers and the output projection; embeddings are looked up, not multiplied."""
        per_layer = sum(
            count * (each.own_weights + each.num_experts * each.expert_weights) for count, each in self.layers
        )
        return per_layer + self.head_weights

    def cut(self, ways: int) -> "ModelCosts":
        """What one of `ways` devices has of it under tensor parallelism; latents are on all of them."""
        layers = tuple(Layers(count, _cut(each, ways)) for count, each in self.layers)
        return ModelCosts(
            name=self.name,
            hidden_dim=self.hidden_dim,
            layers=layers,
            own_kind=self.own_kind,
            expert_kind=self.expert_kind,
            head_weights=self.head_weights // ways,
            head_bytes=self.head_bytes // ways,
            shared_bytes=self.shared_bytes // ways,
        )

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def _cut(layer: LayerCosts, ways: int) -> LayerCosts:
    heads = min(ways, max(1, layer.kv_heads))
    return layer._replace(
        own_weights=layer.own_weights // ways,
        own_bytes=layer.own_bytes // ways,
        own_features=layer.own_features // ways,
        expert_weights=layer.expert_weights // ways,
        expert_bytes=layer.expert_bytes // ways,
        expert_features=layer.expert_features // ways,
        attended_flops=layer.attended_flops // ways,
        prefill_flops=layer.prefill_flops // ways,
        cached_numbers=layer.cached_numbers // heads,
        kv_heads=max(1, layer.kv_heads // heads),
        state_bytes=layer.state_bytes // ways,
    )
