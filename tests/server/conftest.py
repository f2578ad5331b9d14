"""Fixtures for all server tests: one front with two scripted ranks per module, and network namespaces per test."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.namespaces import made_namespaces
from tests.support.service.real_service import write_tiny_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a tokenizer, for services with real engines."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


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
    """Return the names of two network namespaces on one switch, or of the number that a test parametrises."""
    with made_namespaces(getattr(request, "param", 2)) as names:
        yield names
