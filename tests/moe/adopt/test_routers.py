"""Routers of families use the kernel if it chooses the same experts. Others keep their own forward."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.support.models.families import FAMILIES, make_model
from tests.support.operators import Operators
from tests.support.ranks import RankPool

KEEP_THEIRS = ("ernie4_5_moe", "minimax_m2")  # a nested module, a bias that is an argument
FEW = ("deepseek_v3",)
RULES: dict[str, dict[str, Any]] = {
    "mixtral": {"is_sigmoid": False, "normalise": True, "groups": 1},
    "qwen2_moe": {"is_sigmoid": False, "normalise": False},
    "deepseek_v2": {"groups": 4, "groups_chosen": 2, "best_of_group": True, "scale": 1.5},
    "deepseek_v3": {
        "groups": 4,
        "groups_chosen": 2,
        "best_of_group": False,
        "scale": 1.5,
        "is_sigmoid": True,
    },
}
CPU = torch.device("cpu")
ROWS = 6


class Seen(NamedTuple):
    """Numbers of a model's routers and of exchanged ones, and the deviation of results."""

    num_routers: int
    exchanged: int
    rules: set[Any]
    difference: float  # of dense weights
    is_typed_alike: bool


def dense(module: Any, routed: Any) -> torch.Tensor:
    logits, weights, ids = routed
    return torch.zeros(logits.shape).scatter(1, ids, weights.float())


def is_exchanged(module: nn.Module) -> bool:
    return hasattr(type(module), "form")


def route_both_ways(family: str) -> Seen:
    """Exchange a family's routers. Run rows through each, and through its class's own forward."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.routers import Routers  # noqa: PLC0415
    from moe.gpu.routing import route  # noqa: PLC0415

    net = make_model(family)
    routers = [module for module in net.modules() if "Router" in type(module).__name__]
    exchanged = adopt(net.modules(), (Routers(route),), SampleRows(torch.float32, CPU))["Routers"]
    assert exchanged == sum(is_exchanged(module) for module in routers)
    worst, alike = 0.0, True
    rules = {module.form.rule for module in routers if is_exchanged(module)}
    for module in routers if exchanged else ():
        x = torch.randn(ROWS, module.weight.shape[1])
        parent: Any = type(module).__mro__[1]
        ours, theirs = module(x), parent.forward(module, x)
        assert torch.equal(ours[0], theirs[0])
        alike &= [each.dtype for each in ours] == [each.dtype for each in theirs]
        worst = max(worst, float((dense(module, ours) - dense(module, theirs)).abs().max()))
    return Seen(len(routers), exchanged, rules, worst, alike)


@pytest.mark.parametrize(
    "family", [*FEW, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES if each not in FEW)]
)
def test_a_familys_routers_choose_and_weigh_as_transformers_has_them(
    interpreter: RankPool, family: str
) -> None:
    found: Seen = interpreter.run(route_both_ways, family)[0]
    assert found.num_routers and found.exchanged == (0 if family in KEEP_THEIRS else found.num_routers)
    assert found.difference < 1e-5 and found.is_typed_alike
    for rule in found.rules:
        assert {name: getattr(rule, name) for name in RULES.get(family, {})} == RULES.get(family, {})


def kind_of_router(
    *, power: int = 1, warmth: float = 1.0, largest: bool = True, first: int = 0
) -> type[nn.Module]:
    """Return a class like Mixtral's router, or one with other weights, scaled logits, the least likely experts or fewer
    results. Adoption is decided by class, so each is a separate one."""

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = linear(x.reshape(-1, 16), self.weight) * warmth
            weights, ids = logits.softmax(-1).topk(2, largest=largest)
            return (logits, (weights / weights.sum(-1, keepdim=True)) ** power, ids)[first:]

    return Router


def exchanged_kinds() -> list[bool]:
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.routers import Routers  # noqa: PLC0415
    from moe.gpu.routing import route  # noqa: PLC0415

    plain = kind_of_router()
    others = [{"power": 2}, {"warmth": 0.5}, {"largest": False}, {"first": 1}]
    odd = [kind_of_router(**other)() for other in others]  # type: ignore[arg-type]
    net = nn.ModuleList([plain(), *odd, nn.Linear(16, 8), plain()])
    adopt(net.modules(), (Routers(route),), SampleRows(torch.float32, CPU))
    assert type(net[0]) is type(net[-1]), "one class for all of a kind, or torch.compile compiles each layer"
    return [is_exchanged(module) for module in net]


def test_a_router_that_does_something_else_keeps_its_own(interpreter: RankPool) -> None:
    assert interpreter.run(exchanged_kinds)[0] == [True, False, False, False, False, False, True]


def route_by_a_devices_weight() -> tuple[bool, float, bool]:
    """As with --batch-invariant: the weight is not a parameter and has its own product."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415
    from moe.adopt.routers import Routers  # noqa: PLC0415
    from moe.gpu.device_weight import DeviceWeight, OneGroup  # noqa: PLC0415 - in the interpreter
    from moe.gpu.routing import route  # noqa: PLC0415

    plain: Any = kind_of_router()
    net: Any = nn.ModuleList([plain()])
    weight = net[0].weight.detach()
    del net[0]._parameters["weight"]
    net[0].weight = DeviceWeight(weight, OneGroup(CPU, is_invariant=True), torch.float32, CPU)
    adopt(net.modules(), (Routers(route),), SampleRows(torch.float32, CPU))
    x = torch.randn(ROWS, 16)
    ours, theirs = net[0](x), plain.forward(net[0], x)
    return (
        is_exchanged(net[0]),
        float((dense(net[0], ours) - dense(net[0], theirs)).abs().max()),
        torch.equal(ours[0], theirs[0]),
    )


@pytest.mark.slow
def test_a_routers_weight_that_multiplies_by_itself_goes_on_doing_so(interpreter: RankPool) -> None:
    is_exchanged, difference, has_equal_logits = interpreter.run(route_by_a_devices_weight)[0]
    assert is_exchanged and has_equal_logits and difference < 1e-5


class WideRouter(nn.Module):
    """Multiplies in float32, like DeepSeek's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = linear(x.reshape(-1, 16).float(), self.weight.float())
        weights, ids = logits.sigmoid().topk(2)
        return logits, weights / weights.sum(-1, keepdim=True), ids


def route_wide(has_product: bool) -> tuple[str, float, bool, list[str]]:
    """Return the adopted product, the deviation of logits, whether choices are equal, and the operators of a call."""
    from moe.adopt.adopt import SampleRows, adopt  # noqa: PLC0415 - in the interpreter
    from moe.adopt.routers import Routers, _logits  # noqa: PLC0415
    from moe.gpu.routing import route  # noqa: PLC0415

    torch.manual_seed(0)
    net: Any = nn.ModuleList([WideRouter()])
    product = (lambda x, weight: (x.double() @ weight.double().t()).float()) if has_product else None
    adopt(net.modules(), (Routers(route, wide_product=product),), SampleRows(torch.bfloat16, CPU))
    x = torch.randn(ROWS, 16).bfloat16()
    with Operators() as ran:
        logits = _logits(net[0], x, net[0].form.product, product)
    ours, theirs = net[0](x), WideRouter.forward(net[0], x)
    assert torch.equal(logits, ours[0])
    difference = float((logits - theirs[0]).abs().max())
    return net[0].form.product, difference, torch.equal(ours[2], theirs[2]), ran.names


def test_a_router_that_multiplies_in_float32_widens_its_weight_once(interpreter: RankPool) -> None:
    product, difference, is_same, ran = interpreter.run(route_wide, False)[0]
    assert (product, difference, is_same) == ("widened", 0.0, True)
    assert ran.count("aten::_to_copy") == 1, "only the rows are widened"


def test_a_device_that_sums_short_types_in_float32_widens_nothing(interpreter: RankPool) -> None:
    product, difference, is_same, _ = interpreter.run(route_wide, True)[0]
    assert product == "summed wide" and is_same and difference < 1e-4
