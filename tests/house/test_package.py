"""The installed package: imports of a script that runs in any folder."""

import subprocess
import sys
from pathlib import Path


def test_a_folder_that_is_called_wideep_does_not_hide_the_module(tmp_path: Path) -> None:
    """The clone is such a folder for a script in its parent folder."""
    (tmp_path / "wideep").mkdir()
    code = "from wideep import SamplingParams; print(SamplingParams.__module__)"
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0 and answer.stdout.startswith("server."), answer.stderr
