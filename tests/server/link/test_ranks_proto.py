"""The checked-in gRPC code is what ranks.proto says today."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path("server/link")


def test_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools")
    subprocess.run(
        [
            *(sys.executable, "-m", "grpc_tools.protoc", "-I."),
            *(f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", "server/link/ranks.proto"),
        ],
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    for name in ("ranks_pb2.py", "ranks_pb2_grpc.py"):
        fresh = (tmp_path / FOLDER / name).read_text()
        assert _code(fresh) == _code((ROOT / FOLDER / name).read_text()), f"{name} is old: run `make proto`"


def _code(text: str) -> list[str]:
    """The lines that matter: the generators' version numbers differ between machines."""
    return [
        line
        for line in text.splitlines()
        if line.strip()
        and not line.startswith("#")
        and "VERSION" not in line
        and not line.strip().rstrip(",").isdigit()
    ]
