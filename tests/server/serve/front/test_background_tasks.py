"""What the HTTP side of a front does in the background goes on after an error, or ends the front."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from server.front.errors import ApiError
from server.serve.front.http_service import HttpService

TIMEOUT_S = 30.0


@pytest.mark.parametrize("broken", ["tick", "balance"])
def test_the_ticker_goes_on_after_an_error(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.serve.front.http_service.EVERY_S", 0.001)
    calls = {
        name: Mock(side_effect=ApiError(409, name) if name == broken else None)
        for name in ("tick", "balance")
    }
    service = SimpleNamespace(fronts=None, leads=True, roles=SimpleNamespace(balance=calls["balance"]))
    http: Any = SimpleNamespace(
        _service=service,
        _throughput=SimpleNamespace(tick=calls["tick"]),
        _options=SimpleNamespace(log=SimpleNamespace(stats=False)),
    )

    async def run() -> None:
        ticking = asyncio.create_task(HttpService._keep_ticking(http))
        async with asyncio.timeout(TIMEOUT_S):
            while not all(call.call_count > 2 for call in calls.values()):
                await asyncio.sleep(0.001)
        ticking.cancel()

    asyncio.run(run())
    assert f"ApiError: {broken}" in caplog.text


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [(ApiError(400, "The adapter 'a' cannot be served"), False), (OSError(5, "EIO"), True)],
)
def test_a_start_without_its_adapters_ends_the_front(
    error: Exception, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    http: Any = SimpleNamespace(
        _service=SimpleNamespace(leads=True, adapters=SimpleNamespace(start=AsyncMock(side_effect=error))),
        _options=SimpleNamespace(lora_modules=(), lora_dir=None),
        stop=Mock(),
    )
    with pytest.raises(type(error)):
        asyncio.run(HttpService._start_adapters(http))
    http.stop.assert_called_once_with(0)
    assert ("the adapters of the start cannot be loaded" in caplog.text) is is_logged
