"""Make the demo model once per machine and recipe, safely if any process is killed.

The checkpoint is made in a separate folder next to the target, under a file lock, and renamed when it is complete. So
a reader sees all of it or nothing, and two processes do not make it twice. The work runs in a child
process: the caller does not import torch, and the memory is freed when the child ends. The child inherits the lock's
descriptor, so the lock outlives a killed parent until the child has noticed.

The sampling defaults of a checkpoint are a few numbers; its weights are hundreds of megabytes. If our defaults change, an
existing model keeps its weights, and its generation_config.json is rewritten.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TextIO

from moe.demo_model.source import DemoModelError, Report, fetch_source

RECIPE_VERSION = "v1"  # increase with every change of the recipe; the old checkpoint is then not touched
FOLDER_NAME = f"demo-{RECIPE_VERSION}"
GENERATION_CONFIG = "generation_config.json"
# The first two are SmolLM2's own defaults (its model card); at temperature 1 a model of this size rambles. Without the
# penalty it repeats itself to the end of the context.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
ADVICE_VERSION = 2  # version of SAMPLING; 1 had no penalty
MANIFEST_NAME = "wideep-demo.json"
NEEDED_DISK_BYTES = 1_100_000_000  # wheel 93 MB, GGUF 98 MB, checkpoint 695 MB, and a reserve
DOWNLOAD_SHARE = 0.1  # of the whole work, by time on a fast connection
_OUR_ROOT = str(Path(__file__).resolve().parents[2])  # goes before another folder called `moe`
WAITING = "waiting for another process that makes it"


class Build(Protocol):
    """Makes a checkpoint in `out`, using `scratch`. Stores downloads in `downloads`."""

    def __call__(
        self, *, downloads: Path, scratch: Path, out: Path, lock_fd: int, report: Report
    ) -> None: ...


def ensure_demo_model(cache_root: Path | None = None, *, report: Report | None = None) -> Path:
    """Return the folder of the demo model's checkpoint. Make it first if it does not exist.

    Experts are sorted from those used by prose to those used by code, so that a contiguous placement has a
    skewed load as soon as traffic has one topic.

    Args:
        cache_root: WideEP's cache folder; None is `${XDG_CACHE_HOME:-~/.cache}/wideep`.
        report: Called with a stage and the finished share. None draws a bar on stderr.

    Raises:
        DemoModelError: The weights are not available, the disk is full or not writable, or the conversion failed.
    """
    target = demo_model_path(cache_root)
    if is_complete(target):
        refresh_advice(target)
        return target
    if report is not None:
        return make_once(target, build_in_child, report)
    bar = ProgressBar("Making the demo model (once)")
    try:
        return make_once(target, build_in_child, bar)
    finally:
        bar.close()


def demo_model_path(cache_root: Path | None = None) -> Path:
    """Return the path of the demo model, which need not exist."""
    if cache_root is None:
        configured = Path(os.environ.get("XDG_CACHE_HOME", ""))
        # The XDG specification says to ignore relative paths.
        cache_root = (configured if configured.is_absolute() else Path.home() / ".cache") / "wideep"
    return cache_root / FOLDER_NAME


def is_complete(target: Path) -> bool:
    """Return whether `target` holds every file of its manifest, with the listed size."""
    try:
        sizes = _manifest(target)["bytes"]
        return all((target / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False


def refresh_advice(target: Path) -> None:
    """Rewrite a complete model's generation_config.json if an older version of WideEP made it.

    The manifest is correct between any two writes, so a kill does no harm. A folder that is not writable (another
    user's, or on a read-only disk) is left unchanged.
    """
    if _manifest(target).get("advice", 1) >= ADVICE_VERSION or not os.access(target, os.W_OK):
        return
    with _locked(target.parent, f"{target.name}.lock", lambda _stage, _part: None):
        manifest = _manifest(target)
        if manifest.get("advice", 1) >= ADVICE_VERSION:
            return
        path = target / GENERATION_CONFIG
        advice = json.dumps({**json.loads(path.read_text()), **SAMPLING}, indent=1) + "\n"
        sizes = {name: size for name, size in manifest["bytes"].items() if name != GENERATION_CONFIG}
        _replace(target / MANIFEST_NAME, _as_json({**manifest, "bytes": sizes}))
        _replace(path, advice)
        sizes[GENERATION_CONFIG] = len(advice)
        _replace(target / MANIFEST_NAME, _as_json({**manifest, "bytes": sizes, "advice": ADVICE_VERSION}))


def _replace(path: Path, content: str) -> None:
    """Write a file completely or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(content)
    partial.replace(path)


def _manifest(target: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((target / MANIFEST_NAME).read_text())
    return content


def _as_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def make_once(target: Path, build: Build, report: Report) -> Path:
    """Run `build` under the lock unless `target` is complete, and move its result to `target`.

    Raises:
        DemoModelError: The cache folder cannot be used, or `build` failed.
    """
    root = target.parent
    partial = root / f"{target.name}.partial"
    with _locked(root, f"{target.name}.lock", report) as lock_fd:
        if is_complete(target):  # another process made it during the wait
            return target
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed run
        _check_disk(root)
        out = partial / "model"
        out.mkdir(parents=True)
        build(
            downloads=root / "downloads", scratch=partial / "scratch", out=out, lock_fd=lock_fd, report=report
        )
        _write_manifest(out)
        shutil.rmtree(target, ignore_errors=True)  # if damaged
        out.rename(target)
        shutil.rmtree(partial)
    return target


def build_in_child(*, downloads: Path, scratch: Path, out: Path, lock_fd: int, report: Report) -> None:
    """Download the weights, then convert them in a child process that reports on its standard output.

    Raises:
        DemoModelError: The weights are not available, or the child failed; the message ends with the child's last output.
    """
    source = fetch_source(downloads, scratch, lambda stage, part: report(stage, part * DOWNLOAD_SHARE))
    # -P and an explicit path: a folder called `moe` in the user's directory must not be run instead of ours.
    command = [sys.executable, "-P", "-m", "moe.demo_model.build"]
    command += ["--gguf", str(source.gguf), "--licence", str(source.licence), "--out", str(out)]
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_child_environment(),
            pass_fds=(lock_fd,),
        ) as child:
            assert child.stdout is not None
            try:
                _relay(child.stdout, report)
            except BaseException:
                child.kill()  # Ctrl-C or a failing report: do not leave the child running
                raise
        if child.returncode != 0:
            errors.seek(0)
            last_words = "\n".join(f"    {line}" for line in errors.read().strip().splitlines()[-8:])
            raise DemoModelError(
                f"making the demo model failed with status {child.returncode} (it needs about 4 GB of memory):"
                f"\n{last_words}"
            )


def _relay(lines: IO[str], report: Report) -> None:
    for line in lines:
        fraction, _, stage = line.rstrip("\n").partition("\t")
        report(stage, DOWNLOAD_SHARE + float(fraction) * (1 - DOWNLOAD_SHARE))


def _child_environment() -> dict[str, str]:
    """Return variables for one thread (the order of sums decides the experts), no hub, and our own import path."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([_OUR_ROOT, *(entry or os.getcwd() for entry in sys.path)]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


@contextmanager
def _locked(root: Path, name: str, report: Report) -> Iterator[int]:
    """Hold an exclusive lock. The system releases it with its last holder, even after a kill."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock_fd = os.open(root / name, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise DemoModelError(
            f"cannot write to the cache folder {root}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(WAITING, 0.0)
            fcntl.flock(lock_fd, fcntl.LOCK_EX)
        yield lock_fd
    finally:
        os.close(lock_fd)


def _check_disk(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < NEEDED_DISK_BYTES:
        raise DemoModelError(
            f"the demo model needs {NEEDED_DISK_BYTES / 1e9:.1f} GB in {root}, which has {free / 1e9:.1f} GB free; "
            f"make room or set XDG_CACHE_HOME to another disk"
        )


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"recipe": RECIPE_VERSION, "advice": ADVICE_VERSION, "bytes": sizes}
    (folder / MANIFEST_NAME).write_text(_as_json(manifest))


BAR_CELLS = 30
CLEAR_TO_END_OF_LINE = "\x1b[K"


class ProgressBar:
    """Writes progress to a stream, by default stderr. Call it as a `Report`; `close` ends the line."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._last_line = ""
        self._last_stage = ""

    def __call__(self, stage: str, fraction: float) -> None:
        """Show a stage and the finished share. Writes only if the display changes."""
        if self._is_terminal:
            self._draw_bar(stage, fraction)
        elif stage != self._last_stage:
            self._stream.write(f"{self._title}: {fraction:4.0%}, {stage}\n")
            self._stream.flush()
        self._last_stage = stage

    def close(self) -> None:
        """End the line of a drawn bar."""
        if self._last_line:
            self._stream.write("\n")
            self._stream.flush()
            self._last_line = ""

    def _draw_bar(self, stage: str, fraction: float) -> None:
        filled = round(fraction * BAR_CELLS)
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        line = f"{self._title} [{bar}] {fraction:4.0%} {stage}"
        if line != self._last_line:
            self._stream.write(f"\r{line}{CLEAR_TO_END_OF_LINE}")
            self._stream.flush()
            self._last_line = line
