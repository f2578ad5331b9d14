"""The one-launch kernel for routers that choose experts.

A module is taken for a router when "Router" is in its class's name, it has a weight [experts, hidden] and returns
(logits, weights, experts). Its rule is found out from a twin with random weights in float32, of which no two scores are
equal: how weights follow from logits, and which limit to groups of experts gives the same choice. Then the module itself
says whether it multiplies in float32. Families that do something else, need more than rows (MiniMax-M2's bias is an
argument) or have modules within (ERNIE-4.5's bias is one's), keep their own.

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
from moe.routing import Routing

_ROWS = {"cuda": 1024, "cpu": 16}  # to try; the interpreter takes its time for each
_TOLERANCE = 1e-5  # of weights below some 3; the sums of exponentials have another order
_WITH_BIAS = "correction_bias"  # in the name of what is added to scores where experts are chosen

Launch = Callable[
    ..., tuple[Tensor, Tensor]
]  # (logits [T, E], rule, bias_E=None or float32 [E]) -> ids, weights: a device's `routing.route`


class Routed(NamedTuple):
    """What routers return."""

    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


class _Tried(NamedTuple):
    routed: Routed
    dims: int  # of the rows that it was given: 3 if it takes [1, T, D]


class RouterForm(NamedTuple):
    """How routers of one kind are answered."""

    rule: Routing
    dims: int  # of the rows that are routed: 3 where [1, T, D] are too
    weights_dtype: torch.dtype
    widens: bool  # the product is in float32


class Routers:
    """Proposes the kernel for the routers of one model; their classes get the attribute `form`."""

    def __init__(self, launch: Launch, try_out: Launch | None = None) -> None:
        """`launch` runs the kernel; so does `try_out` where it cannot be launched like that yet."""
        self._launch, self._try_out = launch, try_out or launch
        self._rules: dict[Hashable, Routing | None] = {}
        self._classes: dict[Hashable, type[nn.Module]] = {}

    def __call__(self, module: Any, rows: SampleRows) -> Iterator[Candidate]:
        """See `adopt.Propose`: candidates multiply in the model's type, or in float32."""
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
        for widens in (False, True) if module.weight.dtype == rows.dtype else (True,):
            form = RouterForm(rule, tried.dims, tried.routed.weights_TK.dtype, widens)
            yield Candidate(
                own=lambda _x: tried.routed.logits_TE.float(),
                ours=lambda x, widens=widens: _logits(module, x, widens=widens).float(),
                arguments=lambda: (x_TD,),
                tolerance=0.0,
                install=partial(self._install, module, form),
            )

    def _install(self, module: nn.Module, form: RouterForm) -> None:
        one = type(module), form
        self._classes[one] = self._classes.get(one) or _one_launch(*one, self._launch)
        module.__class__ = self._classes[one]


def _one_launch(own: type[nn.Module], form: RouterForm, launch: Launch) -> type[nn.Module]:
    """Make a router's class with the kernel in it. A class and not a `forward` for each module, so that what
    torch.compile makes of one layer serves all."""

    def forward(self: Any, hidden_states: Tensor) -> Any:
        if hidden_states.dim() > form.dims:
            return own.forward(self, hidden_states)
        logits_TE = _logits(self, hidden_states, widens=form.widens)
        ids_TK, weights_TK = launch(logits_TE, form.rule, bias_E=correction(self))
        return Routed(logits_TE, weights_TK.to(form.weights_dtype), ids_TK)

    return type(own.__name__, (own,), {"forward": forward, "form": form})


def _kind(module: Any) -> tuple[Any, ...]:
    """What a router's rule may follow from: its class, and the numbers that it was made with."""
    numbers = sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and not name.startswith("_")
    )
    return type(module), tuple(module.weight.shape), tuple(numbers)


@torch.no_grad()
def _find_rule(module: Any, device: torch.device, launch: Launch) -> Routing | None:
    """Find the rule that a router's twin follows; None: the kernel does not do what it does."""
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
    """What the kernel makes of logits."""
    ids_TK, weights_TK = launch(logits_TE.float(), rule, bias_E=bias_E)
    return _dense(Routed(logits_TE, weights_TK, ids_TK))


def _twin(module: Any, device: torch.device) -> Any:
    """The same router with random tensors, so that each of them shows in what it returns."""
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
    """Rules whose weights are the router's, for the experts that it chose; the likeliest limit to groups first."""
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
    """Limits of the choice to some groups. A router that has groups uses them, if any of these limits is its own:
    rows seldom show a limit that leaves out little."""
    groups = int(getattr(twin, "num_group", None) or getattr(twin, "n_group", None) or 1)
    chosen = int(getattr(twin, "topk_group", None) or groups)
    if not 1 <= chosen < groups or num_experts % groups:
        return [{}]
    by_best = (False, True) if is_sigmoid else (True, False)  # DeepSeek-V3's and V2's
    return [*({"groups": groups, "groups_chosen": chosen, "best_of_group": best} for best in by_best), {}]


def _try(module: Any, x_TD: Tensor) -> _Tried | None:
    """What a router makes of rows; None if it wants something else, or returns something else."""
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


def _logits(module: Any, hidden_states: Tensor, *, widens: bool) -> Tensor:
    """The router's product, in the model's type or in float32: [T, E]."""
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    bias_E = module._parameters.get("bias")
    if not widens:
        return linear(x_TD, module.weight, bias_E)
    return linear(x_TD.float(), module.weight.float(), None if bias_E is None else bias_E.float())


def correction(module: Any) -> Tensor | None:
    """What a router adds to scores where experts are chosen: [E] float32."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if _WITH_BIAS in name:
            found: Tensor = tensor.float()
            return found
    return None


def _draw(module: Any, rows: SampleRows) -> Tensor:
    return rows.draw(_ROWS[rows.device.type], module.weight.shape[1])


def _dense(routed: Routed) -> Tensor:
    """Weights by expert: [T, E], 0 where it is not chosen."""
    empty_TE = torch.zeros(tuple(routed.logits_TE.shape), device=routed.logits_TE.device)
    return empty_TE.scatter(1, routed.ids_TK, routed.weights_TK.float())
