"""Shared fixtures of the low-latency tests."""

import pytest

from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.local import LocalWire


@pytest.fixture
def face() -> LowLatencyFace:
    """Return a face of one rank."""
    return LowLatencyFace(CpuExchange(LocalWire()))
