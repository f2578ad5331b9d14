"""What tests of a start need of the machine."""

import pytest

import server.serve.preflight.checks


@pytest.fixture
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that every model fits into."""
    monkeypatch.setattr(server.serve.preflight.checks, "available_bytes", lambda: 1 << 40)
