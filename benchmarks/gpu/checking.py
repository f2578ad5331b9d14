"""Is a kernel's answer right: near the oracle's, far from the control's, the same bits twice, written everywhere.

Bounds are of bfloat16: half a unit in the last place is 0.2 % of a value, and products of rounded weights add as much
again; in the interpreter, of float32. Before the second run the result's memory holds NaN, which is near nothing.
"""

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench, MakeCall
from benchmarks.gpu.rows import Row

ERROR = {torch.bfloat16: 8e-3, torch.float32: 1e-5}  # |ours - oracle| / |oracle|, euclidean
WORST = {torch.bfloat16: 0.08, torch.float32: 2e-4}  # greatest difference over the oracle's root mean square
CONTROL_TIMES = 5.0  # the control's error over the bound


def check(bench: Bench, name: str, make: MakeCall) -> Row:
    """Run a kernel twice, and compare."""
    call = make(bench, 0)
    call.prepare()
    first = call.result(call.run()).clone()
    poison(first)
    call.prepare()
    second = call.result(call.run())
    repeats = torch.equal(first, second)
    error, worst = distance(second, call.oracle())
    control, _ = distance(second, call.control())
    bound, worst_bound = ERROR[bench.dtype], WORST[bench.dtype]
    is_right = repeats and error <= bound and worst <= worst_bound and control >= CONTROL_TIMES * bound
    figures = {"error": error, "bound": bound, "worst": worst, "worst bound": worst_bound, "control": control}
    return Row(
        name=name, figures=figures, is_right=is_right, note="" if repeats else "other bits when run again"
    )


def distance(ours: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the relative euclidean error and the worst difference over the root mean square; NaN where one is."""
    ours, other = ours.double(), other.double()
    size = other.norm().item() or 1.0
    difference = (ours - other).abs()
    return difference.norm().item() / size, difference.max().item() / (size / other.numel() ** 0.5)


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the allocator hands out next for a tensor of this size."""
    if like.is_floating_point():
        torch.full_like(like, float("nan"))
