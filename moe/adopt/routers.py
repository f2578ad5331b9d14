"""The one-launch kernel for routers that choose experts.

A module counts as a router if "Router" is in its class name, it has a weight [experts, hidden] and returns
(logits, weights, experts). Its rule is found with a twin that has random float32 weights, so that no two scores are
equal: how weights follow from logits, and which limit to groups of experts gives the same choice. A trial of the module
itself shows whether it multiplies in float32. If it widens rows and weight for that (DeepSeek), a device's product of the
short types with sums in float32 replaces both casts. Otherwise a widened weight is made once. Families with another rule,
with more inputs than rows (MiniMax-M2's bias is an argument) or with inner modules (ERNIE-4.5's bias is in one) keep their
own.

Legend: T rows, D hidden dim, E experts, K choices.
"""

import copy
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from moe.adopt.adopt import FOREIGN_ERRORS, Candidate, SampleRows, first_agreeing
from moe.kernel_weight import KernelWeight
from moe.routing import Routing

_ROWS = {"cuda": 1024, "cpu": 16}  # to try; few on the CPU, because Triton's interpreter is slow
_TOLERANCE = 1e-5  # for weights up to about 3; sums of exponentials have another order
_SUMS_TOLERANCE = 1e-4  # for logits of products that are exact and sums that are in another order
_WITH_BIAS = "correction_bias"  # in the name of the tensor that is added to scores to choose experts

# Takes (logits [T, E], rule, bias_E=None or float32 [E], dtype of the weights), returns ids and weights: a device's
# `routing.route`.
Launch = Callable[..., tuple[Tensor, Tensor]]
# Takes rows [T, D] and a weight [E, D] of a short type, returns float32 [T, E], summed in float32.
WideProduct = Callable[[Tensor, Tensor], Tensor]
# Products of routers: in the rows' type, in it with sums in float32, and of rows and weight in float32.
_PLAIN, _SUMMED_WIDE, _WIDENED = "plain", "summed wide", "widened"


class Routed(NamedTuple):
    """Return value of routers."""

    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


class _Tried(NamedTuple):
    routed: Routed
    dims: int  # of the input rows: 3 if it takes [1, T, D]


class RouterForm(NamedTuple):
    """How the kernel replaces routers of one kind."""

    rule: Routing
    dims: int  # most dimensions of input rows: 3 if [1, T, D] is accepted
    weights_dtype: torch.dtype
    product: str


class _Wide(NamedTuple):
    """A router's tensors in float32."""

    weight_ED: Tensor
    bias_E: Tensor | None


class Routers:
    """Proposes the kernel for the routers of one model. Adopted classes get the attribute `form`.

    Args:
        launch: Runs the kernel.
        try_out: Replaces it in trials if it cannot be launched that way yet.
        wide_product: The device's product of short types with sums in float32. None if it has none.
    """

    def __init__(
        self, launch: Launch, try_out: Launch | None = None, *, wide_product: WideProduct | None = None
    ) -> None:
        self._launch, self._try_out, self._wide_product = launch, try_out or launch, wide_product
        self._rules: dict[Hashable, Routing | None] = {}
        self._classes: dict[Hashable, type[nn.Module]] = {}

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """Propose the kernel after a product in the model's type, and after one in float32."""
        weight = getattr(module, "weight", None)
        is_plain = "Router" in type(module).__name__ and not any(module.children())
        if not is_plain or weight is None or len(weight.shape) != 2:
            return
        kind = _kind(module)
        if kind not in self._rules:
            self._rules[kind] = _find_rule(module, rows.device, self._try_out)
        rule, x_TD = self._rules[kind], _draw(module, rows)
        tried = None if rule is None else _try(module, x_TD)
        if rule is None or tried is None:
            return
        for product in self._products(module, rows):
            form = RouterForm(rule, tried.dims, tried.routed.weights_TK.dtype, product)
            yield Candidate(
                own=lambda _x: tried.routed.logits_TE.float(),
                ours=lambda x, product=product: _logits(module, x, product, self._wide_product).float(),
                arguments=lambda: (x_TD,),
                tolerance=_SUMS_TOLERANCE if product == _SUMMED_WIDE else 0.0,
                install=partial(self._install, module, form),
            )

    def _products(self, module: Any, rows: SampleRows) -> Iterator[str]:
        """Yield the products that a router may have, with the fastest first."""
        if module.weight.dtype == rows.dtype:
            yield _PLAIN
            is_short = rows.dtype in (torch.bfloat16, torch.float16)
            is_plain = is_short and module._parameters.get("bias") is None
            if self._wide_product and is_plain and _takes_wide(module, rows):
                yield _SUMMED_WIDE
        yield _WIDENED

    def _install(self, module: Any, form: RouterForm) -> None:
        one = type(module), form
        self._classes[one] = self._classes.get(one) or self._one_launch(*one)
        if form.product == _WIDENED and module.weight.dtype != torch.float32:
            module.wide = _widened(module)
        module.__class__ = self._classes[one]

    def _one_launch(self, own: type[nn.Module], form: RouterForm) -> type[nn.Module]:
        """Make a router's class that runs the kernel. It is a class, not a `forward` per module, so that
        torch.compile's code for one layer serves all."""
        launch, wide_product = self._launch, self._wide_product

        def forward(self: Any, hidden_states: Tensor) -> Any:
            if hidden_states.dim() > form.dims:
                return own.forward(self, hidden_states)
            logits_TE = _logits(self, hidden_states, form.product, wide_product)
            ids_TK, weights_TK = launch(
                logits_TE, form.rule, bias_E=correction(self), dtype=form.weights_dtype
            )
            return Routed(logits_TE, weights_TK, ids_TK)

        return type(own.__name__, (own,), {"forward": forward, "form": form})


def _kind(module: Any) -> tuple[Any, ...]:
    """Return what a router's rule may depend on: its class, and the numbers in its attributes."""
    numbers = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    )
    return type(module), tuple(module.weight.shape), tuple(numbers)


@torch.no_grad()
def _find_rule(module: Any, device: torch.device, launch: Launch) -> Routing | None:
    """Return the rule that a router's twin follows, or None if the kernel does not have it."""
    twin = _twin(module, device)
    tried = _try(twin, _draw(module, SampleRows(torch.float32, device)))
    if tried is None:
        return None
    own = tried.routed
    found: list[Routing] = []
    candidates = (
        Candidate(
            own=lambda: _dense(own),
            ours=partial(_routed_by, launch, rule, own.logits_TE, correction(twin)),
            arguments=tuple,
            tolerance=_TOLERANCE,
            install=partial(found.append, rule),
        )
        for rule in _rules(twin, own)
    )
    first = first_agreeing(candidates)
    if first is not None:
        first.install()
    return found[0] if found else None


def _routed_by(launch: Launch, rule: Routing, logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
    """Run the kernel on logits and return dense weights."""
    ids_TK, weights_TK = launch(logits_TE.float(), rule, bias_E=bias_E)
    return _dense(Routed(logits_TE, weights_TK, ids_TK))


def _twin(module: Any, device: torch.device) -> Any:
    """Copy a router with random tensors, so that each of them affects the result."""
    generator = torch.Generator().manual_seed(1)
    twin = copy.copy(module)

    def drawn(tensor: Tensor) -> Tensor:
        scale = tensor.shape[-1] ** -0.5 * 2 if len(tensor.shape) == 2 else 0.3
        return (torch.randn(tuple(tensor.shape), generator=generator) * scale).to(device)

    twin._parameters = {
        name: nn.Parameter(drawn(each), False)
        for name, each in module._parameters.items()
        if each is not None
    }
    twin._buffers = {name: drawn(each) for name, each in module._buffers.items() if each is not None}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):  # a `DeviceWeight`
            setattr(twin, name, drawn(value))
    return twin


def _rules(twin: Any, own: Routed) -> Iterator[Routing]:
    """Yield rules that give the router's weights for the experts it chose, with the likeliest limit to groups first."""
    scale = float(getattr(twin, "routed_scaling_factor", 1.0))
    logits_TE = own.logits_TE.float()
    for is_sigmoid in (False, True):
        scores_TE = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
        chosen_TK = scores_TE.gather(1, own.ids_TK)
        for normalise in (False, True):
            weights_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True) if normalise else chosen_TK
            if not torch.allclose(
                weights_TK * scale, own.weights_TK.float(), rtol=_TOLERANCE, atol=_TOLERANCE
            ):
                continue
            for limit in _limits(twin, logits_TE.shape[1], is_sigmoid=is_sigmoid):
                yield Routing(
                    choices=own.ids_TK.shape[1],
                    is_sigmoid=is_sigmoid,
                    normalise=normalise,
                    scale=scale,
                    **limit,
                )


def _limits(twin: Any, num_experts: int, *, is_sigmoid: bool) -> list[dict[str, Any]]:
    """Return possible limits of the choice to some groups. A router with groups is assumed to use them if one
    of these limits fits, because a few rows seldom show a limit that excludes little."""
    groups = int(getattr(twin, "num_group", None) or getattr(twin, "n_group", None) or 1)
    chosen = int(getattr(twin, "topk_group", None) or groups)
    if not 1 <= chosen < groups or num_experts % groups:
        return [{}]
    by_best = (False, True) if is_sigmoid else (True, False)  # DeepSeek-V3 and V2
    return [*({"groups": groups, "groups_chosen": chosen, "best_of_group": best} for best in by_best), {}]


def _try(module: Any, x_TD: Tensor) -> _Tried | None:
    """Run a router on rows. Return None if it takes other inputs or returns something else."""
    for x in (x_TD[None], x_TD):
        try:
            returned = module.forward(x)
        except FOREIGN_ERRORS:
            continue
        if isinstance(returned, tuple) and len(returned) == 3:
            routed = Routed(*returned)
            if _is_by_row(routed, len(x_TD), module.weight.shape[0]):
                return _Tried(routed, x.dim())
    return None


def _is_by_row(routed: Routed, num_rows: int, num_experts: int) -> bool:
    if not all(isinstance(each, Tensor) for each in routed) or routed.ids_TK.dtype != torch.int64:
        return False
    choices = routed.ids_TK.shape[-1]
    shapes = [tuple(each.shape) for each in routed]
    return shapes == [(num_rows, num_experts), (num_rows, choices), (num_rows, choices)]


def _logits(module: Any, hidden_states: Tensor, product: str, wide_product: WideProduct | None) -> Tensor:
    """Return the router's logits: [T, E], in the rows' type or float32."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    if product == _PLAIN:
        return linear(x_TD, module.weight, module._parameters.get("bias"))
    if product == _SUMMED_WIDE:
        assert wide_product is not None, "the trial used it"
        own = _own_wide_product(x_TD, module.weight)
        return wide_product(x_TD, module.weight) if own is None else own
    return linear(x_TD.float(), *(getattr(module, "wide", None) or _widened(module)))


def _takes_wide(module: Any, rows: SampleRows) -> bool:
    """Return whether a router's weight is a parameter, or, with --batch-invariant, has a product with sums in float32."""
    if isinstance(module._parameters.get("weight"), nn.Parameter):
        return True
    return _own_wide_product(rows.draw(1, module.weight.shape[1]), module.weight) is not None


def _own_wide_product(x_TD: Tensor, weight: Tensor) -> Tensor | None:
    """Return the product of a weight that defines it, or None."""
    return weight.multiplied_wide(x_TD) if isinstance(weight, KernelWeight) else None


def _widened(module: Any) -> _Wide:
    bias_E = module._parameters.get("bias")
    return _Wide(module.weight.float(), None if bias_E is None else bias_E.float())


def correction(module: Any) -> Tensor | None:
    """Return the bias that a router adds to scores to choose experts: [E] float32, or None."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if _WITH_BIAS in name:
            found: Tensor = tensor.float()
            return found
    return None


def _draw(module: Any, rows: SampleRows) -> Tensor:
    return rows.draw(_ROWS[rows.device.type], module.weight.shape[1])


def _dense(routed: Routed) -> Tensor:
    """Return weights by expert: [T, E], 0 for experts that were not chosen."""
    empty_TE = torch.zeros(tuple(routed.logits_TE.shape), device=routed.logits_TE.device)
    return empty_TE.scatter(1, routed.ids_TK, routed.weights_TK.float())
