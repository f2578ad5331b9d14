"""Check the version of `transformers` before torch is imported. `attention.transformers_names` handles the differences.

A version below the range fails at the start. A version above the tested ones runs with a note: most releases rename nothing that
WideEP uses, and a new model often needs a new release. If a name is missing, the error names it. Rejected: an upper bound at
the newest tested version, which would make `pip install` keep an old transformers for every user of a new model.
"""

import importlib.metadata
import re

PACKAGE = "transformers"
LOWEST, NEWEST_TESTED, END = (5, 21), (5, 24), (6, 0)
"""Equal to pyproject.toml's. All minor versions between the first two are tested (`make test-lowest`, `test`, `test-newest`)."""


class VersionError(ValueError):
    """The installed `transformers` is not supported; the message has the command that installs a supported version."""


def check_transformers() -> str | None:
    """Return a note if the installed version is newer than the tested ones.

    Raises:
        VersionError: The version is outside the range, or transformers is not installed.
    """
    installed = version_of(PACKAGE)
    if not installed:
        raise VersionError(f"transformers is not installed; {_remedy()}")
    release = _release(installed)
    if not LOWEST <= release < END:
        raise VersionError(f"transformers {installed} is not supported; {_remedy()}")
    if release > NEWEST_TESTED:
        return f"transformers {installed} is newer than {_shown(NEWEST_TESTED)}, the newest version that WideEP is tested with"
    return None


def why_unfit(error: ImportError) -> str | None:
    """Return the message for an import that failed because `transformers` lacks a name, or None for other packages."""
    if (error.name or "").partition(".")[0] != PACKAGE:
        return None
    return f"transformers {version_of(PACKAGE) or '(not installed)'} lacks a name that WideEP needs ({error.msg}); {_remedy()}"


def _remedy() -> str:
    span = f"{PACKAGE}>={_shown(LOWEST)},<{_shown((NEWEST_TESTED[0], NEWEST_TESTED[1] + 1))}"
    return f"versions {_shown(LOWEST)} to {_shown(NEWEST_TESTED)} are tested: pip install '{span}'"


def version_of(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, int]:
    """Return the major and minor number. A development build counts as its release."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _shown(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
