"""Which copy of WideEP runs: the command that starts it again, and how its seven top-level packages are found.

Their names (moe, server, ...) are generic, so a script's folder, PYTHONPATH or another installed distribution may own one of
them, and Python would import that instead. A process of ours takes them from its own root (`take_first`); a script is told
(`check_roots`), for there the other module may be the script's own. `wideep` loads this file by its path, so it imports nothing of ours.
Rejected: our root at the head of sys.path, which would put a whole site-packages before the standard library.
"""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

PACKAGES = ("moe", "dispatch", "expert_placement", "attention", "kvcache", "scheduler", "server")
_OUR_ROOT = Path(__file__).resolve().parents[1]
WIDEEP_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("__main__.py")))  # this very copy


class RootError(ImportError):
    """A top-level package comes from somewhere else than WideEP; the message says whose it is."""


class _OwnPackages(MetaPathFinder):
    """Finds our packages in one root, before anybody else is asked."""

    def __init__(self, root: Path) -> None:
        self._path = [str(root)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a package of ours; None for all other modules, and for what lies inside packages."""
        return PathFinder.find_spec(fullname, self._path, target) if fullname in PACKAGES else None


def take_first(root: Path = _OUR_ROOT) -> None:
    """Let this process import WideEP's packages from `root` alone, whatever sys.path holds."""
    sys.meta_path.insert(0, _OwnPackages(root))


def why_broken(error: ImportError, root: Path = _OUR_ROOT) -> str:
    """Say why our own files cannot be imported: another distribution has written over them, or something is missing."""
    for distribution in importlib.metadata.distributions():
        taken = [
            file
            for file in distribution.files or ()
            if file.parts[0] in PACKAGES
            and Path(str(distribution.locate_file(file))).resolve().is_relative_to(root)
        ]
        if taken and distribution.name != "wideep":
            return (
                f"the distribution {distribution.name} {distribution.version} has written {taken[0]} into WideEP's own folder "
                f"{root}; uninstall it and install WideEP again, or give WideEP a virtual environment of its own"
            )
    return f"cannot import {error.name or 'a module'} from {root}: {error}; install WideEP again"


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
                f"{root}; {_remedy(package, found)}"
            )


def _remedy(package: str, found: Path) -> str:
    folder = found.parent
    if _owner_of(package, found):
        return "uninstall it, or give WideEP a virtual environment of its own"
    if folder in {
        Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    }:
        return f"take {folder} out of PYTHONPATH, or rename it"
    if sys.path and folder == Path(sys.path[0]).resolve():
        return "rename it, or move it out of the script's folder, which Python looks into first"
    return "rename or remove it, or give WideEP a virtual environment of its own"


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
