"""What tests of the low-latency interface share."""

import pytest

from dispatch.faces.low_latency import LowLatencyFace
from dispatch.low_latency.cpu import CpuExchange
from dispatch.wires.local import LocalWire


@pytest.fixture
def face() -> LowLatencyFace:
    """A face of one rank."""
    return LowLatencyFace(CpuExchange(LocalWire()))
