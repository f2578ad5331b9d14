"""What is found before any weight is read."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expert_placement.files import save_placement
from server.process.preflight.checks import (
    check_backend,
    check_compiler,
    check_nodes,
    check_port,
    check_start,
)
from server.process.preflight.memory import rank_experts, weight_bytes
from server.process.preflight.model import read_config, resolve_model
from tests.support.fake_checkpoint import CONFIG, write_checkpoint
from tests.support.placements import random_placement
from tests.support.starts import complaint_of, options_for


@pytest.mark.usefixtures("much_memory")
def test_a_good_model_passes(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), num_ranks=2, num_local_ranks=2, has_front=True)


@pytest.mark.usefixtures("much_memory")
def test_more_ranks_than_experts_are_allowed(tmp_path: Path) -> None:
    check_start(options_for(write_checkpoint(tmp_path)), num_ranks=7, num_local_ranks=1, has_front=False)


def test_a_wrong_path_is_named(tmp_path: Path) -> None:
    assert (
        complaint_of(lambda: read_config(tmp_path / "none"))
        == f"the model path {tmp_path}/none does not exist"
    )
    assert "does not exist" in complaint_of(lambda: resolve_model(str(tmp_path / "none")))
    file = tmp_path / "file"
    file.touch()
    assert "is a file" in complaint_of(lambda: read_config(file))


@pytest.mark.usefixtures("much_memory")
def test_quantisations_that_are_not_served_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for quantisation, message in (
        (
            {"quant_method": "gptq", "bits": 4},
            "cannot be served: the checkpoint is quantised with GPTQ (gptq)",
        ),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "one scale per tensor"),
    ):
        (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
        options = options_for(directory)
        assert message in complaint_of(
            lambda options=options: check_start(options, num_ranks=1, num_local_ranks=1, has_front=False)
        )


@pytest.mark.usefixtures("much_memory")
def test_a_placement_for_the_model_and_the_ranks_passes_and_its_slots_count(tmp_path: Path) -> None:
    model, file = write_checkpoint(tmp_path / "model"), tmp_path / "placement.json"
    save_placement(random_placement(1, 4, 2, 3, seed=1), file)
    options = options_for(model, f"--expert-placement={file}")
    check_start(options, num_ranks=2, num_local_ranks=2, has_front=True)
    weights = weight_bytes(model, CONFIG, 4)
    assert rank_experts(weights, CONFIG, options, 2).slots_per_rank == 3


@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((2, 4, 2, 3), "is a placement of 2 layers of 4 experts on 2 ranks; this service has 1 layers of 4"),
        (
            (1, 5, 2, 3),
            "of 5 experts on 2 ranks; this service has 1 layers of 4 experts on 2 ranks. Plan one",
        ),
        ((1, 4, 4, 2), "on 4 ranks; this service has 1 layers of 4 experts on 2 ranks"),
        (None, "is not a placement: placements are JSON; this is an archive, such as a recorded load"),
        ((), "cannot be read: No such file"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_before_any_rank_starts(
    tmp_path: Path, sizes: tuple[int, ...] | None, said: str
) -> None:
    model, file = write_checkpoint(tmp_path / "model"), tmp_path / "placement.json"
    if sizes:
        save_placement(random_placement(*sizes, seed=1), file)
    elif sizes is None:
        with file.open("wb") as archive:
            np.savez(archive, load=np.ones((3, 1, 4)))
    options = options_for(model, f"--expert-placement={file}")
    complaint = complaint_of(lambda: check_start(options, num_ranks=2, num_local_ranks=2, has_front=True))
    assert complaint.startswith("--expert-placement: ") and str(file) in complaint and said in complaint


def test_a_backend_for_gpus_is_refused_before_the_model_is_looked_at(tmp_path: Path) -> None:
    options = replace(options_for(tmp_path / "none"), all2all_backend="nvshmem")
    complaint = complaint_of(lambda: check_start(options, num_ranks=2, num_local_ranks=2, has_front=True))
    assert complaint.startswith("--all2all-backend is nvshmem, which cannot be used: ")
    assert complaint.endswith("; use auto, gloo or shm")


def test_local_is_refused_for_two_ranks() -> None:
    check_backend("local", 1)
    assert "it serves one: use auto, gloo or shm" in complaint_of(lambda: check_backend("local", 2))


def test_a_compiler_is_refused_with_what_it_cannot_work_with(tmp_path: Path) -> None:
    check_compiler(options_for(tmp_path, "--enable-torch-compile", "--device=cuda"))
    asked = options_for(tmp_path, "--enable-torch-compile", "--device=cpu")
    assert "is for GPUs" in complaint_of(lambda: check_compiler(asked))


def test_nodes_must_be_filled_by_the_ranks() -> None:
    check_nodes(0, 3)
    check_nodes(3, 6)
    assert "give one of [1, 2, 3, 6], or 0" in complaint_of(lambda: check_nodes(4, 6))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is in use" in complaint_of(lambda: check_port("127.0.0.1", port))
    check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    assert f"--host is {host!r}, which is no address of this machine" in complaint_of(
        lambda: check_port(host, 0)
    )
