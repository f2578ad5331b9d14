"""The adapter to DeepEP, with our own `Buffer`, which has the same interface, in place of DeepEP: the oracle's bits."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer
from dispatch.errors import WireUnavailable
from dispatch.mode import NORMAL, Mode, low_latency
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import CPU, Outcome, S, run_layer, run_on_cpu, without_repeats
from tests.dispatch.oracle import RankCase, make_cases
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

pytestmark = needs_triton
BF16 = torch.bfloat16


def run_through(module: Any, layers: list[list[RankCase]], modes: list[Mode], rows: str) -> list[Outcome]:
    from dispatch.gpu.deep_ep import open_deep_ep  # noqa: PLC0415 - the interpreter is chosen before

    dispatcher = open_deep_ep(dist.group.WORLD, device=CPU, slots_per_rank=S, rows=rows, module=module)
    pairs = zip(layers, modes, strict=True)
    results = [run_layer(dispatcher, cases[dist.get_rank()], mode) for cases, mode in pairs]
    dispatcher.close()
    return results


def run_both(
    layers: list[list[RankCase]], modes: list[Mode], rows: str
) -> tuple[list[Outcome], list[Outcome]]:
    stand_in = SimpleNamespace(Buffer=Buffer)
    return run_through(stand_in, layers, modes, rows), run_on_cpu(layers, rows)


@pytest.mark.parametrize("rows", ["auto", pytest.param("fp8", marks=pytest.mark.slow)])
def test_deep_eps_calls_give_the_bits_of_every_other_way(interpreting_pair: RankPool, rows: str) -> None:
    """The modes change from step to step, and memory grows in between."""
    tokens = [[3, 1], [2, 4], [1, 0], [0, 3]]
    layers = [make_cases(seed, n, slots_per_rank=S, hidden=256, dtype=BF16) for seed, n in enumerate(tokens)]
    layers = [[without_repeats(case) for case in cases] for cases in layers]
    modes = [NORMAL, low_latency(4), NORMAL, low_latency(8)]
    for rank, (ours, want) in enumerate(interpreting_pair.run(run_both, layers, modes, rows)):
        for index in range(len(layers)):
            for field, got, cpus in zip(Outcome._fields, ours[index], want[index], strict=True):
                assert torch.equal(got, cpus), f"layer {index}, rank {rank}, {field}"


def open_without_package() -> tuple[str, str]:
    from dispatch.gpu.deep_ep import open_deep_ep  # noqa: PLC0415 - the interpreter is chosen before

    sys.modules["deep_ep"] = None  # type: ignore[assignment]
    absent = catch(lambda: open_deep_ep(dist.group.WORLD, device=CPU, slots_per_rank=S))
    del sys.modules["deep_ep"]
    newer = SimpleNamespace(__version__="2.5.0")
    return absent, catch(lambda: open_deep_ep(dist.group.WORLD, device=CPU, slots_per_rank=S, module=newer))


def test_what_is_missing_of_deep_ep_is_named(interpreting_pair: RankPool) -> None:
    for absent, newer in interpreting_pair.run(open_without_package):
        assert absent.startswith(
            f"{WireUnavailable.__name__}: backend is 'deep_ep', but importing deep_ep failed"
        )
        assert absent.endswith("build it from github.com/deepseek-ai/DeepEP, or use backend='auto'")
        assert "deep_ep is installed as 2.5.0, which has no Buffer" in newer
