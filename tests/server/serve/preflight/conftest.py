"""Fixtures for tests of a start."""

import pytest

import server.serve.preflight.checks


@pytest.fixture
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with memory for every model."""
    monkeypatch.setattr(server.serve.preflight.checks, "available_bytes", lambda: 1 << 40)
