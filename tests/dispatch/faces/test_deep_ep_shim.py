"""The opt-in `deep_ep`: our script runs through it, and so do DeepEP's own test files, from a checkout.

    git clone https://github.com/deepseek-ai/DeepEP && git -C DeepEP checkout dd758ca
    DEEP_EP_CHECKOUT=$PWD/DeepEP python -m pytest -m slow tests/dispatch/faces/test_deep_ep_shim.py

All 144 modes of its elastic test run with the deterministic option (with our version of its references,
`deep_ep.utils.refs`). Not run: --do-cpu-sync 0 together with --deterministic, where the file compares a trimmed tensor with an
untrimmed one and therefore fails; --precise-unbalanced-ratio, which the shim rejects; timing, which a CPU cannot measure.

The files run unmodified (their git blobs are compared with that commit's), with small sizes set by their arguments. Each
is also run with one received value wrong and must then fail. Otherwise its success would mean nothing.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dispatch
from dispatch.deep_ep_shim.__main__ import main
from dispatch.deep_ep_shim.redirect import CudaMeansCpu
from dispatch.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "dispatch" / "faces" / "deep_ep_script.py"
CHECKOUT = os.environ.get("DEEP_EP_CHECKOUT", "")
BLOBS = {  # git blob ids of the files at dd758ca
    "test_intranode.py": "5a1730fbfbd93a83553e356e086b82e8083ba61b",
    "test_internode.py": "6c4a9b795ff0cb219369fb51da5a5b4b073cc483",
    "test_low_latency.py": "99a78bc8ab9ee7cdf64446a7b28425a7966fcd10",
    "test_ep.py": "7344af5f247fea70b68b4b4fd0b98b8635ae91dc",
}
CORRUPTION = """
import torch
from dispatch.faces.buffer import Buffer

dispatch, low_latency_dispatch = Buffer.dispatch, Buffer.low_latency_dispatch

def spoil(rows):
    rows = rows[0] if isinstance(rows, tuple) else rows
    if rows.numel():
        rows.view(-1).view(torch.uint8)[1] ^= 0x41

def spoiled_dispatch(self, *args, **kwargs):
    result = dispatch(self, *args, **kwargs)
    spoil(result[0])
    return result

def spoiled_low_latency_dispatch(self, *args, **kwargs):
    result = low_latency_dispatch(self, *args, **kwargs)
    hook = result[-1]
    def spoiled_hook():
        hook()
        spoil(result[0])
    if hook is None:
        spoil(result[0])
        return result
    return (*result[:-1], spoiled_hook)

Buffer.dispatch = spoiled_dispatch
Buffer.low_latency_dispatch = spoiled_low_latency_dispatch
"""


def run_shim(
    *argv: str, timeout_s: float = 120.0, path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m dispatch.deep_ep_shim argv...` with `path` first in its module search path."""
    paths = [str(p) for p in (path, ROOT) if p is not None]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"} | environment
    return subprocess.run(
        [sys.executable, "-m", "dispatch.deep_ep_shim", *argv],
        capture_output=True, text=True, timeout=timeout_s, env=env, check=False,
    )  # fmt: skip


def spoil_values(directory: Path) -> Path:
    """Make every process with `directory` on its path change one received byte per dispatch."""
    (directory / "sitecustomize.py").write_text(CORRUPTION)
    return directory


@pytest.mark.slow
def test_a_users_script_runs_with_cuda_literals_and_spawned_ranks() -> None:
    run = run_shim(str(SCRIPT), "5")
    assert run.returncode == 0, run.stderr
    assert run.stdout == "all ranks agree\n"


@pytest.mark.slow
def test_a_wrong_value_makes_the_script_fail(tmp_path: Path) -> None:
    run = run_shim(str(SCRIPT), "5", path=spoil_values(tmp_path))
    assert run.returncode != 0
    assert "wrong rows" in run.stderr or "PeerLost" in run.stderr  # one rank asserted, one lost it


def test_the_printed_path_holds_the_package_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--print-path"])
    site = Path(capsys.readouterr().out.strip())
    assert [entry.name for entry in site.iterdir() if entry.name != "__pycache__"] == ["deep_ep"]


@pytest.mark.parametrize("argv", [[], ["--bogus"], ["no/such/script.py"]])
def test_a_bad_command_line_is_answered_with_the_usage(argv: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage: python -m"):
        main(argv)


def test_without_the_shim_there_is_no_deep_ep_and_no_patch() -> None:
    assert importlib.util.find_spec("deep_ep") is None
    assert dispatch.Buffer.is_sm90_compiled()
    assert not hasattr(torch.cuda, "is_redirected_by_wideep")


def test_every_way_to_name_a_cuda_device_means_the_cpu() -> None:
    with CudaMeansCpu():
        x = torch.ones(2, device="cuda")
        ways = [
            torch.zeros(2, device="cuda:1"),
            torch.tensor([1], device=torch.device("cuda", 0)),
            torch.arange(3, device=0),
            torch.empty_like(x, device="cuda"),
            x.to("cuda"),
            x.to(torch.device("cuda"), torch.float64),
            x.to(device="cuda:0", dtype=torch.int64),
            x.cuda(),
        ]
        assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert all(tensor.device.type == "cpu" for tensor in ways)
    assert ways[5].dtype == torch.float64
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.ones(2, device="cuda")  # outside, nothing is redirected


def original(name: str) -> str:
    """Return the path of DeepEP's file in the checkout, unchanged since the commit, or skip."""
    if not CHECKOUT:
        pytest.skip(
            "set DEEP_EP_CHECKOUT to a checkout of deepseek-ai/DeepEP at dd758ca to run its own tests"
        )
    file = Path(CHECKOUT) / "tests" / ("elastic" if name == "test_ep.py" else "legacy") / name
    content = file.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    assert blob == BLOBS[name], f"{name} is not DeepEP's file at dd758ca"
    return str(file)


SIZES = {
    "test_intranode.py": ["--num-tokens", "32", "--hidden", "256", "--num-topk", "4", "--num-experts", "8"],
    "test_low_latency.py": ["--num-tokens", "16", "--hidden", "512", "--num-topk", "4", "--num-experts", "8"],
    "test_internode.py": ["--num-tokens", "16", "--hidden", "128", "--num-topk", "4", "--num-experts", "32"],
    "test_ep.py": [
        "--num-tokens",
        "16",
        "--hidden",
        "128",
        "--num-topk",
        "4",
        "--num-experts",
        "8",
        "--skip-perf-test",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, 4])
def test_deep_eps_intranode_test_passes(num_processes: int) -> None:
    argv = [original("test_intranode.py"), "--num-processes", str(num_processes), *SIZES["test_intranode.py"]]
    run = run_shim(*argv, timeout_s=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" passed") == 24


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--use-logfmt"]])
@pytest.mark.parametrize("num_processes", [2, 4])
def test_deep_eps_low_latency_test_passes(num_processes: int, options: list[str]) -> None:
    file = original("test_low_latency.py")
    argv = [file, "--num-processes", str(num_processes), *SIZES["test_low_latency.py"], *options]
    run = run_shim(*argv, timeout_s=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Dispatch send/recv time") == num_processes  # printed after all checks


@pytest.mark.slow
def test_deep_eps_internode_test_passes_on_two_nodes_of_eight() -> None:
    argv = [sys.executable, "-m", "dispatch.deep_ep_shim", original("test_internode.py")]
    argv += ["--num-processes", "8", *SIZES["test_internode.py"]]
    shared = {
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": "2",
        "MASTER_PORT": str(free_port()),
    }
    nodes = [
        subprocess.Popen(
            argv,
            env=os.environ | shared | {"RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [node.communicate(timeout=600)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    for node, output in zip(nodes, outputs, strict=True):
        assert node.returncode == 0, output
        assert output.count(" passed") == 32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_intranode.py", "test_low_latency.py"])
def test_deep_eps_tests_fail_on_a_wrong_value(name: str, tmp_path: Path) -> None:
    argv = [original(name), "--num-processes", "2", *SIZES[name]]
    run = run_shim(*argv, timeout_s=300, path=spoil_values(tmp_path))
    assert run.returncode != 0
    assert (
        "AssertionError" in run.stderr or "PeerLost" in run.stderr
    )  # from the rank that failed, or from the one that lost it


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


def run_elastic(options: list[str], startup: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run DeepEP's elastic test. Every process runs `startup` first."""
    (directory / "sitecustomize.py").write_text(startup)
    return run_shim(original("test_ep.py"), *SIZES["test_ep.py"], *options, timeout_s=300, path=directory)


@pytest.mark.slow
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
    run = run_elastic(["--num-processes", str(processes), *options], startup, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(" > Testing with ") == modes
    assert ("Ranks: 2 x 2" in run.stdout) == bool(startup)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dispatch", "combine"])
def test_deep_eps_elastic_test_fails_on_a_wrong_value(name: str, tmp_path: Path) -> None:
    run = run_elastic(["--num-processes", "2", "--test-first-only"], SPOILED.format(name=name), tmp_path)
    assert run.returncode != 0 and "AssertionError" in run.stderr
