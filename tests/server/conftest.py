"""One front with two scripted ranks per test module."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.front_process import TIMEOUT_S, FrontProcess
from tests.support.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer's directory."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def front(model_dir: Path) -> Iterator[FrontProcess]:
    """A running front that serves the names "tiny" and "org/tiny-alias"."""
    process = FrontProcess(model_dir, "--served-model-name", "tiny", "org/tiny-alias").attach_all()
    yield process
    status, said = process.close()
    assert (status, said) == (0, ""), "the front ends in silence"


@pytest.fixture(scope="module")
def client(front: FrontProcess) -> Iterator[openai.OpenAI]:
    """The official client, which must not hide failures by trying again."""
    with openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as made:
        yield made
