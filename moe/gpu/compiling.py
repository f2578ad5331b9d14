"""torch.compile between the organs: fuse the code of `transformers` around attention, experts and routing.

Each decoder layer is compiled by itself, once for all layers of a kind. What differs between them (weights, the numbers
that identify organs) is an input of the graph. Organs are operators, so they do not break a graph. Norms and rotary
embeddings are left to the compiler, which fuses them with the residual's sum. Compiling by layer is PyTorch's idea
("regional compilation"); attention as an operator that looks up its state is vLLM's.
Rejected: the whole model in one graph, which grows with the layers and compiles all of them again for every size.
Organs, the routers' kernel and linear layers in FP8 are operators; see `kvcache.gpu.operators`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from kvcache.gpu.operators import Numbered
from moe.backend import serve_experts
from moe.gpu import routing
from moe.gpu.device_weight import DeviceWeight
from moe.routing import Routing

NAME = "wideep_experts_gpu_operator"
_MOST_GRAPHS = 64  # per layer class: kinds of layers (dense, windows) times kinds of sizes (1, one, any)

_MODULES: Numbered[nn.Module] = Numbered()


@torch.library.custom_op("wideep::experts", mutates_args=())
def _experts(hidden: Tensor, ids: Tensor, weights: Tensor, module: int) -> Tensor:
    return serve_experts(_MODULES.find(module), hidden, ids, weights).contiguous()


@_experts.register_fake
def _like_experts(hidden: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(hidden, memory_format=torch.contiguous_format)


def serve(module: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run `moe.backend.serve_experts` as an operator."""
    out_TD: Tensor = torch.ops.wideep.experts(hidden_TD, ids_TK, weights_TK, module.own_number)
    return out_TD


@torch.library.custom_op("wideep::route", mutates_args=())
def _route(
    logits: Tensor, bias: Tensor | None, choices: int, is_sigmoid: bool, softmax_after: bool, normalise: bool,
    scale: float, groups: int, groups_chosen: int, best_of_group: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    chosen = Routing(
        choices=choices, is_sigmoid=is_sigmoid, softmax_after=softmax_after, normalise=normalise, scale=scale,
        groups=groups, groups_chosen=groups_chosen, best_of_group=best_of_group,
    )  # fmt: skip
    return routing.route(logits, chosen, bias_E=bias, dtype=dtype)


@_route.register_fake
def _like_route(logits: Tensor, bias: Tensor | None, choices: int, *rest: Any) -> tuple[Tensor, Tensor]:
    shape, dtype = (logits.shape[0], choices), rest[-1]
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=dtype)


def route(
    logits_TE: Tensor, rule: Routing, *, bias_E: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Run `routing.route` as an operator."""
    ids, weights = torch.ops.wideep.route(
        logits_TE, bias_E, rule.choices, rule.is_sigmoid, rule.softmax_after, rule.normalise, rule.scale, rule.groups,
        rule.groups_chosen, rule.best_of_group, dtype,
    )  # fmt: skip
    return ids, weights


@torch.library.custom_op("wideep::device_linear", mutates_args=())
def _linear(x: Tensor, columns: int, module: int) -> Tensor:
    holder: Any = _MODULES.find(module)
    return nn.functional.linear(x, holder.weight, holder.bias)


@_linear.register_fake
def _like_linear(x: Tensor, columns: int, module: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], columns)


class OperatedLinear(nn.Linear):
    """A linear layer with a weight that has its own product (`moe.gpu.device_weight`), which torch.compile cannot trace."""

    own_number: int

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = torch.ops.wideep.device_linear(input, self.out_features, self.own_number)
        return product


def enter(net: nn.Module) -> None:
    """Number the experts modules, and let linear layers with our weights use the operator."""
    for module in net.modules():
        if hasattr(module, "expert_layer"):
            module.own_number = _MODULES.enter(module)  # type: ignore[assignment]
        elif type(module) is nn.Linear and isinstance(module.weight, DeviceWeight):
            module.own_number = _MODULES.enter(module)  # type: ignore[assignment]
            module.__class__ = OperatedLinear


def register() -> None:
    """Register the operator with `transformers` under `NAME`; may be called again."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, serve)


def decoder_layers(net: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, in order."""
    names = set(net._no_split_modules or ())
    return [module for module in net.modules() if type(module).__name__ in names]


def compile_layers(net: PreTrainedModel, compiler: str) -> None:
    """Compile a model's decoder layers on their first call.

    Args:
        compiler: Backend of torch.compile.
    """
    config = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True  # otherwise one graph per layer number
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    for layer in decoder_layers(net):
        layer.compile(backend=compiler)


def outside_layers(net: PreTrainedModel) -> list[nn.Module]:
    """Return the modules outside all decoder layers, which are not compiled."""
    inside = {id(each) for layer in decoder_layers(net) for each in layer.modules()}
    return [module for module in net.modules() if id(module) not in inside]
