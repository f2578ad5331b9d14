"""A file of API keys."""

from pathlib import Path

from server.options.checks import OptionsError


def read_keys(path: Path) -> tuple[str, ...]:
    """Read a file of keys: one per line; empty lines and those that begin with # are passed over.

    Raises:
        OptionsError: it cannot be read, or a line is no key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"--api-key-file {str(path)!r} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    for number, key in enumerate(keys, start=1):
        if key.split() != [key]:
            raise OptionsError(f"--api-key-file {str(path)!r}: key {number} has white space in it")
    return tuple(keys)
