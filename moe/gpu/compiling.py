"""torch.compile between the organs: what `transformers` computes around attention, experts and routing becomes fused code.

Each decoder layer is compiled by itself, once for all of a kind: what differs between them (weights, the numbers under
which organs are found) is given to the graph. The organs are operators, so that no graph breaks at them. Norms and rotary
are left to the compiler here, which joins them with the residual's sum. The idea of compiling by layer is PyTorch's
("regional compilation"); of attention as an operator that finds its state by itself, vLLM's.
Rejected: the whole model in one graph, which grows with the layers, and compiles them all again for every size.
"""

import torch
from torch import nn
from transformers import PreTrainedModel

_MOST_GRAPHS = 64  # of one layer class: kinds of layers (dense, windows) times kinds of sizes (1, one, any)


def decoder_layers(net: PreTrainedModel) -> list[nn.Module]:
    """The modules that a model repeats, in order."""
    names = set(net._no_split_modules or ())
    return [module for module in net.modules() if type(module).__name__ in names]


def compile_layers(net: PreTrainedModel, compiler: str) -> None:
    """Let a model's decoder layers be compiled when they are first called.

    Args:
        compiler: a backend of torch.compile.
    """
    config = torch._dynamo.config
    config.allow_unspec_int_on_nn_module = True  # else a graph for every layer's number
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    for layer in decoder_layers(net):
        layer.compile(backend=compiler)


def outside_layers(net: PreTrainedModel) -> list[nn.Module]:
    """The modules that no decoder layer holds: those that are not compiled."""
    inside = {id(each) for layer in decoder_layers(net) for each in layer.modules()}
    return [module for module in net.modules() if id(module) not in inside]
