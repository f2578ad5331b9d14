"""`wideep doctor` on one node: its lines, its JSON, its exit status, and its refusals."""

import json
import subprocess
from pathlib import Path

import pytest

from server.cli import main
from server.machine.roots import WIDEEP_COMMAND
from tests.support.models.fake_checkpoint import write_checkpoint

NAMES = [
    *("Python", "packages", "processor", "driver", "GPUs", "GPU links", "NCCL", "NVSHMEM", "RDMA", "gloo interface"),
    *("NCCL interface", "shared memory", "huge pages", "open files", "locked memory", "ports", "HTTP", "model files"),
]  # fmt: skip


def test_one_node_is_a_line_per_check_and_a_count(tmp_path: Path) -> None:
    command = [*WIDEEP_COMMAND, "doctor", "--port=0", str(write_checkpoint(tmp_path)), "-dp", "2"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *lines, empty, count = answer.stdout.splitlines()
    assert (answer.returncode, answer.stderr, empty) == (0, "", "")
    assert [line[10:27].strip() for line in lines] == [*NAMES, "memory"]
    assert {line[:8].strip() for line in lines} <= {"ok", "warning", "not here"}
    assert count.split(" (")[0].endswith(" not here") and ", 0 failures, " in count


def test_ranks_of_all_pools_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", "--port=0", "--device=cpu", str(write_checkpoint(tmp_path))]
    assert main([*words, "--pools=both:2,both:1"]) == 0
    (memory,) = [line for line in capsys.readouterr().out.splitlines() if line[10:27].strip() == "memory"]
    assert "the largest of 3 ranks holds" in memory and "(local ranks: 3)" in memory
    assert main([*words, "--pools=both:2,both:1", "-dp=2"]) == 1
    (failed,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILURE")]
    assert "--pools both:2,both:1 has 3 ranks, but the service has 2" in failed


def test_one_node_as_json_is_one_object_and_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    status = main(["doctor", "--port=0", "--json"])
    written, complaint = capsys.readouterr()
    said = json.loads(written)
    assert (status, complaint) == (1, "")
    assert said["status"] == "failure" and said["seconds"] > 0
    assert [check["check"] for check in said["checks"]] == NAMES
    (failure,) = [check for check in said["checks"] if check["status"] == "failure"]
    assert (failure["check"], failure["node"]) == ("gloo interface", "")
    assert "'no-such-interface', but there is no such interface" in failure["text"] and failure["remedy"]


def test_a_model_directory_that_is_none_is_a_failure_and_all_else_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "tokenizer.json").write_text("{}")
    (dense / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}')
    for model, problem in (
        (tmp_path, "is not a model directory: it has no config.json"), (tmp_path / "x", "does not exist"),
        (dense, "is not a Mixture-of-Experts model"),
    ):  # fmt: skip
        assert main(["doctor", "--port=0", str(model)]) == 1
        lines = capsys.readouterr().out.splitlines()
        failed = [line for line in lines if line.startswith("FAILURE")]
        assert len(failed) == 1 and problem in failed[0], lines
        assert any(" HTTP " in line for line in lines)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--nnodes", "2"], "--nnodes is 2, so --rdzv-endpoint HEAD:PORT is required: the address where the nodes meet"),
        (["--nnodes", "0"], "--nnodes is 0; it must be 1 to 4096"),
        (["--rdzv-endpoint", "h:1"], "--rdzv-endpoint requires --nnodes, the number of nodes that meet there"),
        (["--nproc-per-node", "0"], "--nproc-per-node is 0; it must be at least 1"),
        (["-dp", "4", "--nproc-per-node", "3"], "--nproc-per-node is 3, but --data-parallel-size is 4; both mean the ranks of a node, as torchrun starts them: remove one"),
        (["--wait-seconds", "0"], "--wait-seconds is 0; it must be above 0 and at most 86400 (a day)"),
        (["--nnodes=2", "--rdzv-endpoint=h"], "--rdzv-endpoint is 'h'; it must be HOST:PORT, such as 10.0.0.1:29400"),
        (["--port", "70000"], "--port is 70000; it must be 0 to 65535"),
        (["--ndoes", "2"], "--ndoes is not a flag of `wideep doctor` (did you mean --nnodes?); `wideep doctor --help` lists them"),
    ],
)  # fmt: skip
def test_a_command_line_that_says_nothing_sensible_is_one_sentence_and_status_2(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    assert capsys.readouterr().err == f"wideep doctor: {problem}\n"


def test_more_ranks_than_gpus_can_be_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port=0", "--device=cuda"]) == 1
    assert "--device is cuda, but it is unusable: " in capsys.readouterr().out
