"""Run `wideep` from this copy's folder, regardless of installed packages and the current directory.

A service starts its processes as `python -P .../server/__main__.py COMMAND`: `-m server` would run a folder called
`server` in the user's directory, and the `wideep` script may be missing or belong to another copy.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).resolve().parent.parent / "wideep.py"), run_name="__main__")
