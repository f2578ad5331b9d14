"""Run a script that imports `deep_ep` with WideEP in its place, or print the directory that provides it.

    python -m dispatch.deep_ep_shim path/to/script.py args...
    PYTHONPATH=$(python -m dispatch.deep_ep_shim --print-path) python path/to/script.py args...

Both do the same: the first replaces this process by the second. (On one node it also chooses a free MASTER_PORT if none
is set.) So processes that the script spawns find `deep_ep` too. Nothing is installed: without the directory on the path
there is no `deep_ep`. See `redirect` for the patches that an import applies.
"""

import os
import sys
from pathlib import Path
from typing import NoReturn

from dispatch.ports import free_port

SITE = Path(__file__).resolve().parent / "site"
_USAGE = "usage: python -m dispatch.deep_ep_shim (--print-path | path/to/script.py [args...])"


def main(argv: list[str]) -> None:
    """Run the command line; running a script does not return."""
    if argv == ["--print-path"]:
        print(SITE)
    elif argv and not argv[0].startswith("-"):
        _run(argv)
    else:
        sys.exit(_USAGE)


def _run(argv: list[str]) -> NoReturn:
    if not Path(argv[0]).is_file():
        sys.exit(f"no such script: {argv[0]}\n{_USAGE}")
    environment = dict(os.environ)
    paths = [str(SITE), str(SITE.parents[2]), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    if environment.get("WORLD_SIZE", "1") == "1":
        environment.setdefault("MASTER_PORT", str(free_port()))
    os.execve(sys.executable, [sys.executable, *argv], environment)


if __name__ == "__main__":
    main(sys.argv[1:])
