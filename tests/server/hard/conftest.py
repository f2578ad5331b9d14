"""One front with model-less ranks for all hard tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.paced_front import PacedFront

_RECORDS = "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR"


@pytest.fixture(scope="package")
def hard_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("hard_model"))


@pytest.fixture(scope="package")
def hard_front(hard_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PacedFront]:
    """A front with ranks that answer any accepted request with a few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(_RECORDS, str(tmp_path_factory.mktemp("records")))
        front = PacedFront(hard_model, most_tokens=6).attach_all()
    front.serve_some()
    front.warm_planner()
    yield front
    status, said = front.close()
    assert status == 0, said
    assert "Traceback" not in said, said
