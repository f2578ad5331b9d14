"""Installation of other programs, once, in a folder outside every checkout. The commands are printed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe.demo_model import demo_model_path


class MissingPeerError(RuntimeError):
    """A peer cannot be installed here; the message gives the reason."""


def peers_folder() -> Path:
    """Return $WIDEEP_PEERS, or a folder next to the demo model in the cache."""
    chosen = os.environ.get("WIDEEP_PEERS")
    folder = Path(chosen).expanduser() if chosen else demo_model_path().with_name("peers")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def needs(*commands: str) -> None:
    """Check that commands are installed.

    Raises:
        MissingPeerError: Names the missing commands.
    """
    missing = [command for command in commands if shutil.which(command) is None]
    if missing:
        raise MissingPeerError(f"{' and '.join(missing)} not found")


def run(name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None) -> str:
    """Print and run one step of an installation. Return its output.

    Raises:
        MissingPeerError: The step failed; the message quotes the end of its output.
    """
    words = [str(word) for word in command]
    print(f"   {name}: {' '.join(Path(word).name for word in words)[:100]}", flush=True)
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, **(environment or {})},
    )  # fmt: skip
    if done.returncode:
        raise MissingPeerError(f"{Path(words[0]).name} ended with {done.returncode}: {done.stdout[-600:]}")
    return done.stdout


def download(package: str, into: Path) -> Path:
    """Download one file of a package from the index unless it exists."""
    name, _, version = package.partition("==")
    into.mkdir(exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}*"
    if not list(into.glob(pattern)):
        run(name, [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", into, package])
    return next(iter(sorted(into.glob(pattern))))


def environment(folder: Path) -> Path:
    """Create a virtual environment. Return its Python."""
    if not (folder / "bin" / "python").exists():
        run(folder.name, [sys.executable, "-m", "venv", folder])
    return folder / "bin" / "python"
