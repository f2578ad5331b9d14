"""Run `wideep` from the folder that this file lies in, whatever is installed or in the current directory.

A service starts its own processes as `python -P .../server/__main__.py COMMAND`: `-m server` would run a folder
called `server` in the user's directory, and the `wideep` script may not be there or belong to another copy.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

from server.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
