"""Fixtures for all server tests: one front with two scripted ranks per module, and network namespaces per test."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import TIMEOUT_S, FrontProcess


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def shared_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """A running front that serves the names "tiny" and "org/tiny-alias". It is shared because it takes seconds to start."""
    model = write_tokenizer(tmp_path_factory.mktemp("model"))
    process = FrontProcess(
        model, "--disable-log-stats", "--served-model-name", "tiny", "org/tiny-alias"
    ).attach_all()
    yield process
    status, said = process.close()
    assert (status, said) == (0, ""), "the front prints nothing when it exits"


@pytest.fixture(scope="module")
def front(shared_front: FrontProcess) -> Iterator[FrontProcess]:
    """The shared front, with the requests of other modules forgotten."""
    shared_front.forget()
    yield shared_front
    assert shared_front.said == "", "the front prints nothing while it serves"


@pytest.fixture(scope="module")
def client(front: FrontProcess) -> Iterator[openai.OpenAI]:
    """The official client, without retries: they would hide failures."""
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made


@pytest.fixture
def namespaces(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Create network namespaces on one switch, with addresses 10.213.7.1 and up: two, or the number that a test parametrises."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the `ip` program to make network namespaces")
    hub, *names = [f"wideep-{os.getpid()}-{node}" for node in range(getattr(request, "param", 2) + 1)]
    commands = [f"ip netns add {name}" for name in (hub, *names)]
    commands += [f"ip -n {hub} link add switch type bridge", f"ip -n {hub} link set switch up"]
    for node, name in enumerate(names, start=1):
        commands += [f"ip -n {name} link add veth0 type veth peer name veth{node} netns {hub}"]
        commands += [f"ip -n {hub} link set veth{node} master switch up"]
        commands += [f"ip -n {name} addr add 10.213.7.{node}/24 dev veth0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "veth0")]
    try:
        for command in commands:
            answer = subprocess.run(command.split(), capture_output=True, text=True, timeout=10)
            if answer.returncode:
                pytest.skip(f"cannot make network namespaces here: {command}: {answer.stderr.strip()}")
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)
