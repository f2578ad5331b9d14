"""The expert side of a step on one rank: its number of launches, and that it keeps no rows for moves, which never happen."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.families import make_model
from tests.support.ranks import RankPool

# From the router's product to the layer's result: choice, order with counts, two grouped products, sum.
KERNELS = Counter(choose_experts=1, order_few=1, grouped_rows=2, sum_pairs=1)
PRODUCTS = {"aten::mm", "aten::addmm", "aten::linear"}
# Operators without a launch: views and memory.
FREE = (
    "empty",
    "view",
    "slice",
    "select",
    "alias",
    "reshape",
    "detach",
    "transpose",
    "t.",
    "expand",
    "as_strided",
)


class Seen(NamedTuple):
    """Launches of the router and the experts of one layer in a step, and rows kept to try experts."""

    kernels: Counter[str]
    operators: list[str]
    warm_up: bool  # whether rows of the warm-up were kept
    alone: bool  # whether rows of a prompt were kept on one rank
    wide: int  # with another rank
    are_served: bool


class Launches(TorchDispatchMode):
    """Records kernels, and torch operators outside of them that are launches on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.operators: list[str] = []
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not self.is_inside and not name.removeprefix("aten::").lstrip("_").startswith(FREE):
            self.operators.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def counting(modules: list[Any]) -> Iterator[Launches]:
    """Count what modules launch."""
    from triton.runtime.interpreter import InterpretedFunction  # noqa: PLC0415 - in the interpreter

    run, seen = InterpretedFunction.run, Launches()

    def counted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._len_torch_dispatch_stack():
            seen.kernels[kernel.fn.__name__] += 1
        seen.is_inside = True
        try:
            return run(kernel, *args, **kwargs)
        finally:
            seen.is_inside = False

    InterpretedFunction.run = counted
    hooks = [module.register_forward_pre_hook(lambda *_: seen.__enter__() and None) for module in modules]
    hooks += [module.register_forward_hook(lambda *_: seen.__exit__(None, None, None)) for module in modules]
    try:
        yield seen
    finally:
        InterpretedFunction.run = run
        for hook in hooks:
            hook.remove()


def run_layer(directory: Path) -> Seen:
    from moe.gpu.backend import GpuDevice, warm_up  # noqa: PLC0415 - in the interpreter

    built = build_interpreted(directory)
    model: Any = built.model
    (layer,), cache = model.layers, built.runner._cache
    layer.sample_TD = torch.ones(1, 1)
    warm_up(GpuDevice(device=torch.device("cpu"), dtype=torch.float32), model, cache)
    is_kept = layer.sample_TD is not None
    sequence = list(range(3, 16))
    run_steps(built, [sequence], [[Part(0, 0, 12)]])
    is_kept_alone = layer.sample_TD is not None
    block: Any = next(each for each in model.net.modules() if hasattr(each, "experts"))
    with counting([block.gate, block.experts]) as seen:
        run_steps(built, [sequence], [[Part(0, 12, 13)]])
    layer.step = SimpleNamespace(is_decode_only=False, num_tokens=12)
    layer.dispatcher = SimpleNamespace(world_size=2)
    served = torch.randn(16, 4)
    layer._keep_sample(served)
    kept = layer.sample_TD
    return Seen(
        seen.kernels,
        seen.operators,
        is_kept,
        is_kept_alone,
        len(kept),
        torch.equal(kept, served[: len(kept)]),
    )


def test_a_decode_on_one_rank_needs_few_launches_and_keeps_no_rows(
    interpreter: RankPool, tmp_path: Path
) -> None:
    make_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    seen: Seen = interpreter.run(run_layer, tmp_path, timeout_s=400.0)[0]
    assert seen.kernels == KERNELS
    assert len(seen.operators) == 1 and set(seen.operators) <= PRODUCTS, "only the router's product"
    assert not seen.warm_up and not seen.alone
    assert seen.wide == 8 and seen.are_served, "experts that arrive are tried with served rows"
