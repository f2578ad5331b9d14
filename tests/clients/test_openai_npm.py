"""The openai npm package: answers, streams, errors by class, and an abandoned stream."""

import json
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

NPM = Path(__file__).with_name("npm")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node: make test-clients"),
    pytest.mark.skipif(
        not (NPM / "node_modules" / "openai").is_dir(),
        reason="needs the openai npm package: make test-clients",
    ),
]


def test_everything_a_javascript_client_does(front: FrontProcess) -> None:
    text = "hello é😀"
    for word in ("npm-whole", "npm-stream", "npm-text"):
        front.script(word, text)
    left = front.script("npm-left", "abc", gates={2: threading.Event()})
    answer = subprocess.run(
        ["node", str(NPM / "client.mjs"), front.url], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert answer.returncode == 0, answer.stderr
    got = json.loads(answer.stdout)
    num_tokens = len(front.encode(text))
    assert (got["whole"], got["usage"]) == (text, num_tokens)
    assert (got["roles"], got["text"], got["reasons"]) == (["assistant"], text, ["stop"])
    assert (got["streamUsage"], got["helper"]) == (num_tokens, text)
    assert got["completion"] == text
    assert (got["models"], got["model"]) == (["tiny"], "tiny")
    errors = got["errors"]
    assert errors["missing"][:2] == ["NotFoundError", 404]
    assert errors["wrong"][:3] == ["BadRequestError", 400, "temperature"]
    assert errors["long"][:2] == ["BadRequestError", 400] and "context length" in errors["long"][3]
    rank = front.served("npm-left")
    asked = next(each for each in rank.requests if "npm-left" in front.decode(each.prompt_ids))
    rank.wait_for(lambda told: asked.request_id in told.aborted)
    left.gates[2].set()
