"""`Buffer(backend="deep_ep")` passes every call to the installed package. A fake replaces it, for lack of hardware."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dispatch import Buffer, Config
from dispatch.errors import WireUnavailable
from tests.fixtures import PoolOf


class StandInConfig:
    """The package's own config type."""

    def __init__(self, *values: int) -> None:
        self.values = values


class StandInBuffer:
    """Records its construction and calls."""

    def __init__(self, *positional: Any, **named: Any) -> None:
        self.made = (positional[1:], named)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.runtime = "runtime"
        self.explicitly_destroy = named.get("explicitly_destroy", False)

    def __getattr__(self, name: str) -> Any:
        def record(*positional: Any, **named: Any) -> str:
            self.calls.append((name, positional, named))
            return name

        return record


def stand_in(**attributes: Any) -> ModuleType:
    package = ModuleType("deep_ep")
    package.Buffer, package.Config = StandInBuffer, StandInConfig  # type: ignore[attr-defined]
    for name, value in attributes.items():
        setattr(package, name, value)
    return package


def delegate() -> dict[str, Any]:
    sys.modules["deep_ep"] = stand_in()
    try:
        buffer: Any = Buffer(dist.group.WORLD, 256, 0, True, 12, explicitly_destroy=True, backend="deep_ep")
        x = torch.ones(2, 8, dtype=torch.bfloat16)
        answers = [
            buffer.dispatch(x, num_worst_tokens=0, config=Config(24)),
            buffer.combine(x, "handle", config=None),
            buffer.low_latency_dispatch(x, 1, 2, 3, use_fp8=False),
            buffer.low_latency_query_mask_buffer(x),
            buffer.get_dispatch_layout(x, 8),
            buffer.destroy(),
        ]
        try:
            buffer.dispatch(torch.ones(2, 8))
        except ValueError as error:
            answers.append(str(error))
        calls = buffer._buffer.calls  # type: ignore[attr-defined]
        config = calls[0][2].pop("config")
        return {
            "is_buffer": isinstance(buffer, Buffer),
            "attributes": (buffer.rank, buffer.group_size, buffer.runtime, buffer.explicitly_destroy),
            "made": buffer._buffer.made,  # type: ignore[attr-defined]
            "answers": answers,
            "calls": [(name, len(positional), named) for name, positional, named in calls],
            "config": config.values,
        }
    finally:
        del sys.modules["deep_ep"]


def test_calls_reach_the_package(pool_of: PoolOf) -> None:
    for rank, seen in enumerate(pool_of(2).run(delegate)):
        assert seen["is_buffer"]
        assert seen["attributes"] == (rank, 2, "runtime", True)
        assert seen["made"] == ((256, 0, True, 12), {"explicitly_destroy": True})
        assert seen["answers"][:6] == [name for name, _, _ in seen["calls"]]
        assert "DeepEP supports bfloat16" in seen["answers"][6]
        assert seen["calls"][0] == ("dispatch", 1, {"num_worst_tokens": 0})
        assert seen["calls"][1] == ("combine", 2, {"config": None})
        assert seen["calls"][2] == ("low_latency_dispatch", 4, {"use_fp8": False})
        assert seen["config"] == (24, 6, 256, 6, 258)


def refuse_to_delegate(kind: str) -> str:
    if kind == "shim":
        sys.modules["deep_ep"] = stand_in(is_wideep_shim=True)
    try:
        Buffer(dist.group.WORLD, 128 if kind != "limits" else 100, backend="deep_ep")
    except (WireUnavailable, ValueError) as error:
        return str(error)
    finally:
        sys.modules.pop("deep_ep", None)
    return "nothing"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "importing deep_ep failed: ModuleNotFoundError"),
        ("shim", "the imported deep_ep is WideEP's own shim"),
        ("limits", "num_nvl_bytes is 100; DeepEP needs a multiple of 128"),
    ],
)
def test_without_the_package_there_is_a_named_error(pool_of: PoolOf, kind: str, message: str) -> None:
    for text in pool_of(2).run(refuse_to_delegate, kind):
        assert message in text
