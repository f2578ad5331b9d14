"""The cost of running a model: numbers, bytes and features of each kind of layer. No torch.

`read_model` counts them on a model on the meta device; `roofline` and simulators convert them to seconds. A *weight* is a
number that every row is multiplied by (two operations); a *feature* is a number that enters or leaves such a product and
that some kernel reads or writes.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class LayerCosts(NamedTuple):
    """One layer.

    The fields cover the computation of a rank for its own rows (projections, dense and shared experts, the router), the
    routed experts, and the context that a row's attention reads.
    """

    own_weights: int
    own_bytes: int  # size of these weights
    own_features: int  # per row
    num_experts: int  # routed; 0 in a layer without experts
    top_k: int  # experts per row
    expert_weights: int  # of one expert
    expert_bytes: int
    expert_features: int  # per row and expert
    attended_flops: int  # per row and attended token, in decodes
    prefill_flops: int  # the same in prompts, where latents are first expanded to heads
    cached_numbers: int  # per token of context that attention reads
    kv_heads: int  # heads of these numbers; 1 for latents
    index_numbers: int  # per token of context that a sparse index reads
    reach: int  # maximum tokens that a row attends to; 0 is no limit
    state_bytes: int  # of a recurrence, per sequence


class Layers(NamedTuple):
    """A group of equal layers."""

    num: int
    each: LayerCosts


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model.

    Attributes:
        name: Model type.
        hidden_dim: Numbers in a row that is sent to experts.
        layers: All layers, in groups of equal ones.
        own_kind, expert_kind: Storage format of weights: bfloat16, fp8, mxfp4, ...
        head_weights, head_bytes: Size of the output projection.
        shared_bytes: Size of all weights that every rank holds, including embeddings.
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
        """Return the number of layers with routed experts."""
        return sum(layers.num for layers in self.layers if layers.each.num_experts)

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts in a layer that has any."""
        return max(layers.each.num_experts for layers in self.layers)

    @property
    def top_k(self) -> int:
        """Return the number of experts per row."""
        return max(layers.each.top_k for layers in self.layers)

    @property
    def all_experts_bytes(self) -> int:
        """Return the size of one copy of every expert in every layer."""
        return sum(count * each.num_experts * each.expert_bytes for count, each in self.layers)

    @property
    def active_weights(self) -> int:
        """Return the number of weights that one token is multiplied by, including the output projection."""
        per_layer = sum(
            count * (each.own_weights + each.top_k * each.expert_weights) for count, each in self.layers
        )
        return per_layer + self.head_weights

    @property
    def total_weights(self) -> int:
        """Return the number of weights in all layers and the output projection; embeddings are looked up, not multiplied."""
        per_layer = sum(
            count * (each.own_weights + each.num_experts * each.expert_weights) for count, each in self.layers
        )
        return per_layer + self.head_weights

    def cut(self, ways: int) -> "ModelCosts":
        """Return the part on one of `ways` devices with tensor parallelism; latents are on all of them."""
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
        """Return the fields as JSON values."""
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
