"""What a model offers to adapters, and the check that an adapter fits it.

A weight takes an adapter if its product with a step's rows goes through our kernels, which a trial shows at the start
(`moe.cpu.adopt_layers.note_products`). So a weight that a family uses in another way is refused by name, and never silently left out.

Legend: E experts, R rank, K input features, N output features.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import AdapterFiles, FactorLayout, LowRank

# Parts of names that differ between the transformers version of an adapter and this one, or between a model and its text part.
_ALIASES = (
    ("language_model.", ""), ("block_sparse_moe", "mlp"), ("model.layers.", "model.language_model.layers."),
)  # fmt: skip
_MOST_NAMED = 3


class LayerExperts(NamedTuple):
    """The experts of one layer."""

    num_experts: int
    hidden: int
    inner: int
    has_gate: bool
    is_concatenated: bool  # gate's outputs before up's; otherwise they alternate

    @property
    def up_dim(self) -> int:
        """Outputs of the first product."""
        return self.inner * (2 if self.has_gate else 1)


class WeightShape(NamedTuple):
    """A weight [N, K]; of an embedding, N ids of K values."""

    n: int
    k: int


@dataclass(frozen=True)
class Targets:
    """The weights of a model that take adapters, by the path of their module."""

    linears: Mapping[str, WeightShape]
    embeddings: Mapping[str, WeightShape]
    experts: Mapping[str, LayerExperts]
    other: frozenset[str] = field(default=frozenset())  # modules with weights that take no adapter

    def find(self, product: LowRank) -> str | None:
        """Return the model's path of a product's module, or None if no module takes it."""
        if product.layout is FactorLayout.LINEAR:
            offered: Mapping[str, object] = self.linears
        elif product.layout is FactorLayout.EMBEDDING:
            offered = self.embeddings
        else:
            offered = self.experts
        return next((path for path in _spellings(product.module) if path in offered), None)

    def resolve(self, adapter: AdapterFiles) -> dict[LowRank, str]:
        """Return the model's path for each of an adapter's products.

        Raises:
            AdapterError: A product belongs to no module of this model, to one that takes none, or has another shape.
        """
        paths, strangers = {}, []
        for product in adapter.products:
            path = self.find(product)
            if path is None:
                strangers.append(product.module)
            else:
                self._check_shape(product, path)
                paths[product] = path
        if strangers:
            raise AdapterError(f"{adapter.directory}: {self._why_strange(strangers)}")
        return paths

    def _why_strange(self, modules: list[str]) -> str:
        names = list(dict.fromkeys(modules))
        shown = ", ".join(names[:_MOST_NAMED]) + (
            f" and {len(names) - _MOST_NAMED} more" if names[_MOST_NAMED:] else ""
        )
        if any(path in self.other for each in names for path in _spellings(each)):
            return f"this model uses {shown} in another way than a product with rows, so adapters on it are not supported"
        return f"this model has no {shown}; the adapter was made for another model"

    def _check_shape(self, product: LowRank, path: str) -> None:
        wanted_a, wanted_b = self._shapes(product, path)
        for side, stored, wanted in (("A", product.a, wanted_a), ("B", product.b, wanted_b)):
            if stored.shape not in wanted:
                shapes = " or ".join(str([*shape]) for shape in wanted)
                raise AdapterError(
                    f"{product.name}: {side} has the shape {[*stored.shape]}; this model needs {shapes} with rank {product.rank}"
                )

    def _shapes(self, product: LowRank, path: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the shapes that A and B may have."""
        rank = product.rank
        if product.layout is FactorLayout.LINEAR:
            weight = self.linears[path]
            return [(rank, weight.k)], [(weight.n, rank)]
        if product.layout is FactorLayout.EMBEDDING:
            weight = self.embeddings[path]
            return [(rank, weight.n)], [(weight.k, rank)]
        experts = self.experts[path]
        E, is_down = experts.num_experts, product.leaf in ("down", "down_proj")
        fan_in = experts.inner if is_down else experts.hidden
        if product.layout is FactorLayout.FUSED:
            known = "gate_up_proj" if experts.has_gate else "up_proj"
            if product.leaf not in (known, "down_proj"):
                raise AdapterError(
                    f"{product.module} has no parameter {product.leaf}; it has {known} and down_proj"
                )
            fan_out = experts.hidden if is_down else experts.up_dim
            return [(E * rank, fan_in)], [(fan_out, rank * E)]
        if product.leaf == "gate" and not experts.has_gate:
            raise AdapterError(f"{product.module} has no gates")
        fan_out = experts.hidden if is_down else experts.inner
        if product.layout is FactorLayout.SINGLE:
            if product.expert >= E:
                raise AdapterError(f"{product.name}: the model has {E} experts in this layer")
            return [(rank, fan_in)], [(fan_out, rank)]
        return [(count, rank, fan_in) for count in (E, 1)], [(count, fan_out, rank) for count in (E, 1)]


def _spellings(module: str) -> list[str]:
    """Return a module's path and other spellings of it."""
    found = [module]
    for old, new in _ALIASES:
        found += [path.replace(old, new) for path in found if old in path]
    return found
