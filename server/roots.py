"""Which copy of WideEP runs: the command that starts it again, and a start-up check that WideEP's seven top-level packages are ours.

Their names (moe, server, ...) are generic, so another installed distribution may own one of them and Python would
import that instead. We look every package up without importing it and compare the folder with our own.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

PACKAGES = ("moe", "dispatch", "expert_placement", "attention", "kvcache", "scheduler", "server")
_OUR_ROOT = Path(__file__).resolve().parents[1]
WIDEEP_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("__main__.py")))  # this very copy


class RootError(RuntimeError):
    """A top-level package comes from somewhere else than WideEP; the message says whose it is."""


def check_roots(root: Path = _OUR_ROOT, packages: tuple[str, ...] = PACKAGES) -> None:
    """Check that every package would be imported from `root`.

    Raises:
        RootError: naming the package, where it comes from and the distribution that installed it.
    """
    for package in packages:
        found = _find_folder(package)
        if found is None:
            raise RootError(f"the package {package!r} is missing from {root}; install WideEP again")
        if found != root / package:
            raise RootError(
                f"Python finds the package {package!r} in {found}{_owner_of(package, found)}, which hides WideEP's in "
                f"{root}; uninstall it, or give WideEP a virtual environment of its own"
            )


def _find_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.origin is not None:
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    return Path(
        next(iter(spec.submodule_search_locations or ["."]))
    ).resolve()  # a folder without __init__.py


def _owner_of(package: str, folder: Path) -> str:
    """Name the distribution that put `package` where it is, as ' (distribution X 1.0)'; '' if none did."""
    for distribution in importlib.metadata.distributions():
        owns = any(file.parts[0] == package for file in distribution.files or ())
        if owns and Path(str(distribution.locate_file(package))).resolve() == folder:
            return f" (distribution {distribution.name} {distribution.version})"
    return ""
