"""A front on a full disk (a small tmpfs): failures to store are reported, and all works again when there is room."""

import contextlib
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import FrontProcess
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow
DISK_BYTES = 4 << 20


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def front(disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """A front that keeps answers and files on the small file system."""
    model = write_tokenizer(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(disk))
        process = FrontProcess(model, "--served-model-name=m", f"--files-dir={disk / 'files'}", num_ranks=1)
    yield process.attach_all()
    process.close()


@contextlib.contextmanager
def full(disk: Path) -> Iterator[None]:
    """Fill the disk to the last byte."""
    ballast = disk / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    try:
        yield
    finally:
        ballast.unlink()


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_an_idempotency_key_that_met_a_full_disk_works_again_when_there_is_room(
    front: FrontProcess, disk: Path, fields: dict[str, Any]
) -> None:
    front.script("full", "answer")
    key = f"full-{len(fields)}"

    def ask() -> httpx.Response:
        body = {"model": "m", "prompt": "full", "max_tokens": 8, **fields}
        return front.post("/v1/completions", json=body, headers={"Idempotency-Key": key})

    with full(disk):
        refused = ask()
        assert refused.status_code == 503 and "cannot be kept" in refused.json()["error"]["message"]
    answers = [ask() for _ in range(3)]
    assert [each.status_code for each in answers] == [200] * 3
    assert len({each.content for each in answers}) == 1
    assert [each.headers.get("idempotent-replayed") for each in answers] == [None, "true", "true"]


def test_a_batch_that_meets_a_full_disk_has_failed_and_its_answers_can_be_read(
    front: FrontProcess, disk: Path
) -> None:
    goes_on = threading.Event()
    front.script("first", "one")
    front.script("second", "two", gates={1: goes_on})
    lines = [  # the stored part of the second line ends in a block that does not fit
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": word},
        }
        for name, word in (("1", "first"), ("2" * 5000, "second"))
    ]
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = front.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).json()["id"]
    batch = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    path = f"/v1/batches/{front.post('/v1/batches', json=batch).json()['id']}"
    seen: dict[str, Any] = {}

    def shows(**wanted: Any) -> bool:
        seen.update(front.get(path).json())
        return all(seen[name] == value for name, value in wanted.items())

    wait_until(lambda: shows(request_counts={"total": 2, "completed": 1, "failed": 0}), lambda: str(seen))
    with full(disk):
        goes_on.set()
        wait_until(lambda: shows(status="failed"), lambda: str(seen), within_s=30)
        assert seen["errors"]["data"][0]["code"] == "disk_full"
        [answered] = front.get(f"/v1/files/{seen['output_file_id']}/content").text.splitlines()
        assert json.loads(answered)["custom_id"] == "1"
        refused = front.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
        assert refused.status_code == 507
    assert front.post("/v1/files", files={"file": content}, data={"purpose": "batch"}).status_code == 200
    assert front.get(path).json()["status"] == "failed"
