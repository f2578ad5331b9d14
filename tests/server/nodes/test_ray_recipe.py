"""The class of the Ray app, with a replacement for Ray, starts a real service and passes requests on to it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from tests.house.test_autoscaling_recipes import read_app
from tests.support.service.forked import WIDEEP


@pytest.mark.slow
def test_the_class_of_the_ray_app_passes_requests_on_to_its_service(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "wideep"
    program.write_text(f'#!/bin/sh\nexec {" ".join(WIDEEP)} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("MODEL", str(model))
    monkeypatch.setenv("FLAGS", "-dp 1 --kv-cache-memory 16M")
    app, _ = read_app(monkeypatch)
    replica = app.WideEP()
    try:
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 4, "temperature": 0, "stream": True}

        async def scenario() -> tuple[dict[str, Any], str]:
            await replica.check_health()
            models = await _passed_on(replica, "GET", "/v1/models")
            return json.loads(models), await _passed_on(replica, "POST", "/v1/completions", body)

        models, stream = asyncio.run(scenario())
        assert models["data"][0]["id"] == "tiny"
        assert stream.startswith("data: {") and stream.endswith("data: [DONE]\n\n")
        replica._process.kill()
        replica._process.wait()
        with pytest.raises(RuntimeError, match="wideep serve ended with status -9"):
            asyncio.run(replica.check_health())
    finally:
        replica._process.terminate()
        replica._process.wait(60)


async def _passed_on(replica: Any, method: str, path: str, body: dict[str, Any] | None = None) -> str:
    """Return the body of a response that the replica passes on."""
    content = b"" if body is None else json.dumps(body).encode()
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"", "headers": [(b"content-type", b"application/json"), (b"host", b"ray")],
        "server": ("ray", 8000), "scheme": "http",
    }  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": content, "more_body": False}

    answer = await replica.pass_on(Request(scope, receive))
    assert answer.status_code == 200
    return b"".join([piece async for piece in answer.body_iterator]).decode()
