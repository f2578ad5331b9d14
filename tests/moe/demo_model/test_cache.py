"""The cache: the model is made once, interruptions are harmless, and later uses cost nothing. All builders are fakes."""

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from moe.demo_model import cache
from moe.demo_model.cache import (
    WAITING,
    ProgressBar,
    demo_model_path,
    ensure_demo_model,
    is_complete,
    make_once,
)
from moe.demo_model.source import DemoModelError, Report, SourceFiles

TIMEOUT_S = 60.0
REPOSITORY = Path(__file__).parents[3]


def ignore(stage: str, fraction: float) -> None:
    """Ignore a report."""


class FakeBuild:
    """Downloads a wheel if missing, counts builds, writes a two-file model. `meanwhile` runs half-way."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile

    def __call__(self, *, downloads: Path, scratch: Path, out: Path, lock_fd: int, report: Report) -> None:
        downloads.mkdir(exist_ok=True)
        with (downloads / "builds").open("a") as builds:
            builds.write("build\n")
        scratch.mkdir()
        (scratch / "weights.gguf").write_bytes(b"gguf")
        (out / "config.json").write_text("{}")
        self._meanwhile()
        (out / "model.safetensors").write_bytes(b"weights")


def num_builds(root: Path) -> int:
    return len((root / "downloads" / "builds").read_text().splitlines())


def build_until_told(target: Path, line: Connection) -> None:
    """Build in a process that stops half-way, reports it, and continues after a signal."""

    def meanwhile() -> None:
        line.send("half-way")
        line.recv()

    make_once(target, FakeBuild(meanwhile), ignore)


def build_after_waiting(target: Path, line: Connection) -> None:
    """Build in a process that reports when it has to wait."""
    make_once(target, FakeBuild(), lambda stage, fraction: line.send(stage))


def start(
    function: Callable[[Path, Connection], None], target: Path
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=function, args=(target, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def receive(line: Connection) -> object:
    assert line.poll(TIMEOUT_S), "the other process did not report in time"
    return line.recv()


def test_a_made_model_has_its_files_and_leaves_nothing_else(tmp_path: Path) -> None:
    target = make_once(tmp_path / "demo", FakeBuild(), ignore)
    assert target == tmp_path / "demo"
    assert is_complete(target)
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.lock", "downloads"]


def test_a_complete_model_is_not_made_again(tmp_path: Path) -> None:
    for _ in range(2):
        make_once(tmp_path / "demo", FakeBuild(), ignore)
    assert num_builds(tmp_path) == 1


@pytest.mark.parametrize("damage", ["truncated", "removed", "manifest"])
def test_a_damaged_model_is_made_again(tmp_path: Path, damage: str) -> None:
    target = make_once(tmp_path / "demo", FakeBuild(), ignore)
    if damage == "truncated":
        (target / "model.safetensors").write_bytes(b"wei")
    elif damage == "removed":
        (target / "config.json").unlink()
    else:
        (target / cache.MANIFEST_NAME).write_text("{")
    assert not is_complete(target)
    assert is_complete(make_once(target, FakeBuild(), ignore))
    assert num_builds(tmp_path) == 2


class DatedBuild(FakeBuild):
    """Builds like the first version: generation_config.json has no penalty."""

    def __call__(self, **folders: Any) -> None:
        super().__call__(**folders)
        advice = {"eos_token_id": 2, "do_sample": True, "temperature": 0.2, "top_p": 0.9}
        (folders["out"] / cache.GENERATION_CONFIG).write_text(json.dumps(advice))


def make_dated(root: Path) -> Path:
    """Create a model as the first version left it."""
    target = make_once(demo_model_path(root), DatedBuild(), ignore)
    manifest = json.loads((target / cache.MANIFEST_NAME).read_text())
    del manifest["advice"]
    (target / cache.MANIFEST_NAME).write_text(json.dumps(manifest))
    return target


def test_a_model_that_is_there_gets_new_advice_and_keeps_its_weights(tmp_path: Path) -> None:
    target = make_dated(tmp_path)
    weights = (target / "model.safetensors").stat()
    for _ in range(2):
        assert ensure_demo_model(tmp_path) == target
        assert is_complete(target)
        advice = json.loads((target / cache.GENERATION_CONFIG).read_text())
        assert advice == {"eos_token_id": 2, **cache.SAMPLING}
    assert cache.SAMPLING["repetition_penalty"] == 1.1
    assert (target / "model.safetensors").stat() == weights
    assert num_builds(tmp_path) == 1


@pytest.mark.parametrize("num_written", range(3))
def test_new_advice_that_is_interrupted_costs_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """Whichever files were written before the kill, the model is whole, and the next start continues."""
    target = make_dated(tmp_path)
    left, replace = num_written, cache._replace

    def replace_until_killed(path: Path, content: str) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        replace(path, content)

    with monkeypatch.context() as killed:
        killed.setattr(cache, "_replace", replace_until_killed)
        with pytest.raises(KeyboardInterrupt):
            ensure_demo_model(tmp_path)
    assert is_complete(target)
    ensure_demo_model(tmp_path)
    assert json.loads((target / cache.GENERATION_CONFIG).read_text())["repetition_penalty"] == 1.1


def test_killed_half_way_the_next_call_recovers(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    process, line = start(build_until_told, target)
    assert receive(line) == "half-way"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    assert (tmp_path / "demo.partial" / "model" / "config.json").exists()
    assert not target.exists()
    assert is_complete(make_once(target, FakeBuild(), ignore))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.lock", "downloads"]


def test_two_processes_make_it_once(tmp_path: Path) -> None:
    target = tmp_path / "demo"
    first, first_line = start(build_until_told, target)
    assert receive(first_line) == "half-way"
    second, second_line = start(build_after_waiting, target)
    assert receive(second_line) == WAITING
    first_line.send("go on")
    for process in (first, second):
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    assert num_builds(tmp_path) == 1
    assert is_complete(target)


def test_the_lock_outlives_a_dead_parent_while_its_child_holds_it(tmp_path: Path) -> None:
    held: list[int] = []

    def die(*, lock_fd: int, **_: object) -> None:
        held.append(os.dup(lock_fd))  # like the inherited descriptor of a child that still writes
        raise DemoModelError("killed")

    with pytest.raises(DemoModelError, match="killed"):
        make_once(tmp_path / "demo", die, ignore)
    stages: list[str] = []

    def report(stage: str, fraction: float) -> None:
        stages.append(stage)
        os.close(held.pop())

    make_once(tmp_path / "demo", FakeBuild(), report)
    assert stages == [WAITING]


def test_a_failed_build_leaves_no_model_and_the_next_one_works(tmp_path: Path) -> None:
    def fail() -> None:
        raise DemoModelError("no more memory")

    with pytest.raises(DemoModelError, match="no more memory"):
        make_once(tmp_path / "demo", FakeBuild(fail), ignore)
    assert not (tmp_path / "demo").exists()
    assert is_complete(make_once(tmp_path / "demo", FakeBuild(), ignore))


def test_a_full_disk_is_a_named_error_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "NEEDED_DISK_BYTES", 1 << 60)
    with pytest.raises(DemoModelError, match=r"needs .* GB in .* free; make room or set XDG_CACHE_HOME"):
        make_once(tmp_path / "demo", FakeBuild(), ignore)
    assert not (tmp_path / "downloads").exists()


def test_an_unusable_cache_folder_is_a_named_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DemoModelError, match=r"cannot write to the cache folder .*file.*XDG_CACHE_HOME"):
        make_once(tmp_path / "file" / "demo", FakeBuild(), ignore)


@pytest.mark.slow
def test_a_failing_child_is_a_named_error_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    garbage = tmp_path / "weights.gguf"
    garbage.write_bytes(b"not a GGUF file, but long enough to be opened as one" * 10)
    monkeypatch.setattr(cache, "fetch_source", lambda *_: SourceFiles(gguf=garbage, licence=garbage))
    with pytest.raises(DemoModelError, match=r"failed with status 1 .*\n[\s\S]*GGUF magic invalid"):
        ensure_demo_model(tmp_path / "cache", report=ignore)


def test_a_child_that_is_no_longer_listened_to_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "fetch_source", lambda *_: SourceFiles(gguf=tmp_path, licence=tmp_path))
    started: list[subprocess.Popen[str]] = []

    class Recorded(subprocess.Popen[str]):
        def __init__(self, *args: object, **kwargs: object) -> None:
            endless = [sys.executable, "-c", "print('0.5\\tworking', flush=True); input()"]
            super().__init__(endless, **{**kwargs, "stdin": subprocess.PIPE})  # type: ignore[arg-type,call-overload]
            started.append(self)

    monkeypatch.setattr("moe.demo_model.cache.subprocess.Popen", Recorded)

    def interrupt(stage: str, fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(tmp_path / "cache", report=interrupt)
    assert started[0].returncode == -signal.SIGKILL


def test_a_ready_model_is_returned_without_importing_torch(tmp_path: Path) -> None:
    target = make_once(demo_model_path(tmp_path), FakeBuild(), ignore)
    script = (
        "import sys; from pathlib import Path; from moe.demo_model import ensure_demo_model;"
        f"print(ensure_demo_model(Path({str(tmp_path)!r})));"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip(), done.stderr) == (str(target), "")


def test_the_cache_is_where_xdg_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo_model_path() == tmp_path / "wideep" / "demo-v1"
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification ignores relative paths
    assert demo_model_path() == Path("/home/someone/.cache/wideep/demo-v1")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model_path() == Path("/home/someone/.cache/wideep/demo-v1")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_one_line_per_stage() -> None:
    stream = io.StringIO()
    bar = ProgressBar("Making", stream)
    for stage, fraction in (("reading", 0.0), ("reading", 0.05), ("writing", 0.5), ("writing", 1.0)):
        bar(stage, fraction)
    bar.close()
    assert stream.getvalue() == "Making:   0%, reading\nMaking:  50%, writing\n"


def test_a_terminal_gets_one_line_redrawn_in_place_and_ended_once() -> None:
    stream = Terminal()
    bar = ProgressBar("Making", stream)
    for fraction in (0.0, 0.5, 0.5, 1.0):
        bar("reading", fraction)
    bar.close()
    bar.close()
    drawn = stream.getvalue()
    assert drawn.count("\r") == 3  # an unchanged line is not drawn again
    assert drawn.count("\n") == 1
    assert f"[{'#' * 15}{'.' * 15}]  50% reading" in drawn
