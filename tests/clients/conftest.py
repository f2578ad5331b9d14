"""A front with scripted ranks for every client. Requirements of the clients are in requirements-clients.txt."""

from collections.abc import Iterator

import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import FrontProcess

MAX_LEN = 4096  # clients send long tool descriptions


@pytest.fixture(scope="package")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """Return a running front that serves the name "tiny"."""
    model = write_tokenizer(tmp_path_factory.mktemp("model"))
    process = FrontProcess(model, "--served-model-name", "tiny", max_len=MAX_LEN).attach_all()
    yield process
    process.close()
