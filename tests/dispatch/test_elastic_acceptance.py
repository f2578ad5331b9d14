"""DeepEP's own tests/elastic/test_ep.py through the shim, unmodified, from a checkout that is given.

    git clone https://github.com/deepseek-ai/DeepEP && git -C DeepEP checkout dd758ca
    DEEP_EP_CHECKOUT=$PWD/DeepEP python -m pytest -m slow tests/dispatch/test_elastic_acceptance.py

All 144 modes with the deterministic option (and its references in our words, `deep_ep.utils.refs`). Not run: --do-cpu-sync
0 together with --deterministic, where the file compares a trimmed tensor with an untrimmed one and so fails by itself;
--precise-unbalanced-ratio, which the shim refuses; timing, which measures nothing on a CPU.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = os.environ.get("DEEP_EP_CHECKOUT", "")
BLOB = "7344af5f247fea70b68b4b4fd0b98b8635ae91dc"  # git's name of the file's content at dd758ca
SIZES = ["--num-tokens", "16", "--hidden", "128", "--num-topk", "4", "--num-experts", "8", "--skip-perf-test"]
MODES = 144
HYBRID = """
import functools
from dispatch.faces.elastic import ElasticBuffer
ElasticBuffer.__init__ = functools.partialmethod(ElasticBuffer.__init__, node_size=2)
"""
SPOILED = """
import torch
from dispatch.faces.elastic import ElasticBuffer
{name} = ElasticBuffer.{name}
def spoiled(self, *args, **kwargs):
    result = {name}(self, *args, **kwargs)
    values = result[0][0] if isinstance(result[0], tuple) else result[0]
    values.view(-1).view(torch.uint8)[1] ^= 0x41
    return result
ElasticBuffer.{name} = spoiled
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not CHECKOUT, reason="DEEP_EP_CHECKOUT names no checkout of deepseek-ai/DeepEP at dd758ca"
    ),
]


def run_original(options: list[str], startup: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run the file; `startup` is executed by every process before it."""
    file = Path(CHECKOUT) / "tests" / "elastic" / "test_ep.py"
    content = file.read_bytes()
    assert hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == BLOB, (
        "not DeepEP's file at dd758ca"
    )
    (directory / "sitecustomize.py").write_text(startup)
    return subprocess.run(
        [sys.executable, "-m", "dispatch.deep_ep_shim", str(file), *SIZES, *options],
        env=os.environ | {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", "GLOO_SOCKET_IFNAME": "lo"},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    ("processes", "options", "startup", "modes"),
    [
        (2, ["--deterministic"], "", MODES),
        (2, ["--deterministic", "--masked-ratio", "0.3", "--allow-multiple-reduction", "0"], "", MODES),
        (4, ["--deterministic", "--masked-ratio", "0.1"], HYBRID, MODES),
        (4, ["--deterministic", "--allow-multiple-reduction", "0", "--test-first-only"], HYBRID, 1),
        (2, ["--do-cpu-sync", "0", "--masked-ratio", "0.3", "--test-first-only"], "", 1),
        (
            4,
            ["--deterministic", "--unbalanced-ratio", "2.0", "--allow-hybrid-mode", "0", "--test-first-only"],
            "",
            1,
        ),
    ],
)
def test_deep_eps_elastic_test_passes(
    processes: int, options: list[str], startup: str, modes: int, tmp_path: Path
) -> None:
    run = run_original(["--num-processes", str(processes), *options], startup, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" > Testing with ") == modes
    assert ("Ranks: 2 x 2" in run.stdout) == bool(startup)


@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_deep_eps_elastic_test_fails_on_a_wrong_value(name: str, tmp_path: Path) -> None:
    run = run_original(["--num-processes", "2", "--test-first-only"], SPOILED.format(name=name), tmp_path)
    assert run.returncode != 0 and "AssertionError" in run.stderr
