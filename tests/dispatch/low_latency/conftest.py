"""What tests of the low-latency interface share."""

import pytest

from dispatch.low_latency.cpu_exchange import CpuExchange
from dispatch.low_latency.face import LowLatencyFace
from dispatch.wires.local import LocalWire


@pytest.fixture
def face() -> LowLatencyFace:
    """A face of one rank."""
    return LowLatencyFace(CpuExchange(LocalWire()))
