"""The running copy of WideEP: the command that starts it again, and the lookup of its seven top-level packages.

Their names (moe, server, ...) are generic, so a script's folder, PYTHONPATH or another installed distribution may have
packages with these names, and Python would import those instead. WideEP's own processes import from their own root
(`take_first`). A script gets an error (`check_roots`), because the other module may be the script's. `wideep` loads this
file by its path, so it imports no other module of WideEP. Rejected: putting the root first in sys.path, which would put
a whole site-packages before the standard library.
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
_OUR_ROOT = Path(__file__).resolve().parents[2]
WIDEEP_COMMAND = (sys.executable, "-P", str(Path(__file__).parents[1] / "__main__.py"))  # starts this copy


class RootError(ImportError):
    """A top-level package comes from outside WideEP; the message has its origin."""


class _OwnPackages(MetaPathFinder):
    """Import hook that finds WideEP's packages in one root, before all other finders."""

    def __init__(self, root: Path) -> None:
        self._path = [str(root)]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package of WideEP. Returns None for other modules and for modules inside packages."""
        return PathFinder.find_spec(fullname, self._path, target) if fullname in PACKAGES else None


def take_first(root: Path = _OUR_ROOT) -> None:
    """Import WideEP's packages only from `root` in this process, regardless of sys.path."""
    sys.meta_path.insert(0, _OwnPackages(root))


def why_broken(error: ImportError, root: Path = _OUR_ROOT) -> str:
    """Return why WideEP's files cannot be imported: another distribution overwrote them, or a module is missing."""
    for distribution in importlib.metadata.distributions():
        taken = [
            file
            for file in distribution.files or ()
            if file.parts[0] in PACKAGES
            and Path(str(distribution.locate_file(file))).resolve().is_relative_to(root)
        ]
        if taken and distribution.name != "wideep":
            return (
                f"the distribution {distribution.name} {distribution.version} wrote {taken[0]} into WideEP's folder "
                f"{root}; uninstall it and reinstall WideEP, or use a separate virtual environment for WideEP"
            )
    return f"cannot import {error.name or 'a module'} from {root}: {error}; reinstall WideEP"


def check_roots(root: Path = _OUR_ROOT, packages: tuple[str, ...] = PACKAGES) -> None:
    """Check that every package is imported from `root`.

    Raises:
        RootError: A package comes from elsewhere; the message names its location and its distribution.
    """
    for package in packages:
        found = _find_folder(package)
        if found is None:
            raise RootError(f"the package {package!r} is missing from {root}; reinstall WideEP")
        if found != root / package:
            raise RootError(
                f"Python finds the package {package!r} in {found}{_owner_of(package, found)}, which hides WideEP's in "
                f"{root}; {_remedy(package, found)}"
            )


def _remedy(package: str, found: Path) -> str:
    folder = found.parent
    if _owner_of(package, found):
        return "uninstall it, or use a separate virtual environment for WideEP"
    if folder in {
        Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
    }:
        return f"remove {folder} from PYTHONPATH, or rename it"
    if sys.path and folder == Path(sys.path[0]).resolve():
        return "rename it, or move it out of the script's folder, which Python searches first"
    return "rename or remove it, or use a separate virtual environment for WideEP"


def _find_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    if spec.origin is not None:
        origin = Path(spec.origin).resolve()
        return origin.parent if origin.name == "__init__.py" else origin
    # A folder without __init__.py.
    return Path(next(iter(spec.submodule_search_locations or ["."]))).resolve()


def _owner_of(package: str, folder: Path) -> str:
    """Return the distribution that installed `package`, as ' (distribution X 1.0)'. Returns '' if there is none."""
    for distribution in importlib.metadata.distributions():
        owns = any(file.parts[0] == package for file in distribution.files or ())
        if owns and Path(str(distribution.locate_file(package))).resolve() == folder:
            return f" (distribution {distribution.name} {distribution.version})"
    return ""
