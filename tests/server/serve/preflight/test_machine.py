"""The state of one node, read below folders that replace /proc, /sys and /dev: every problem is named."""

import json
import resource
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from server.machine import versions
from server.machine.interfaces import Interface
from server.machine.report import Check, CheckStatus
from server.options.reading import options_from_keywords
from server.options.table import Options
from server.serve.preflight import machine as doctor
from server.serve.preflight.device import ChosenDevice, Gpu, GpuFacts
from server.serve.preflight.machine import Machine
from tests.support.models.fake_checkpoint import write_checkpoint

MEMINFO = "MemTotal: 4096 kB\nMemAvailable: 2048 kB\nHugePages_Total: 7\n"
H200 = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=140 << 30, total_bytes=141 << 30)
FACTS = GpuFacts(
    devices=(H200, H200, H200), torch="2.11.0", built_for="13.0", driver="13.1", triton="3.6.0", nccl="2.28.9"
)
GPUS = ChosenDevice(name="cuda", reason="3 x NVIDIA H200", facts=FACTS)
CPU = ChosenDevice(name="cpu", reason="this machine has no CUDA device", facts=GpuFacts())
ETH0 = Interface("eth0", ("10.0.0.7",))
LO = Interface("lo", ("127.0.0.1",))
LIMITS = {resource.RLIMIT_NOFILE: 20_000, resource.RLIMIT_MEMLOCK: 8 << 20}


def write(root: Path, files: dict[str, str]) -> Path:
    """Write files below a folder, and return the folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A small healthy machine without a GPU and without RDMA."""
    write(
        tmp_path,
        {
            "proc/cpuinfo": "flags : avx2 fma\n",
            "proc/meminfo": MEMINFO,
            "proc/sys/net/ipv4/ip_local_port_range": "32768\t60999\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        },
    )
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    return Machine(
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        dev=tmp_path / "dev",
        environment={},
        host="node",
        interfaces=lambda: [LO, ETH0],
        resolve=lambda _host: "10.0.0.7",
        limit_of=LIMITS.__getitem__,
        shared_bytes=lambda _path: 8 << 30,
    )


def options(**keywords: object) -> Options:
    return options_from_keywords("demo", {"max_num_seqs": 64, **keywords}, {})


def add_rdma(root: Path, *, state: str = "4: ACTIVE", has_devices: bool = True) -> Path:
    write(
        root / "sys/class/infiniband/mlx5_0/ports/1",
        {"state": state, "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"},
    )
    if has_devices:
        (root / "dev" / "infiniband").mkdir()
    return root


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_a_healthy_machine_is_green_and_what_it_lacks_is_not_here(machine: Machine) -> None:
    found = by_name(doctor.check_machine(machine, CPU, options(), num_ranks=2, num_nodes=2, has_front=True))
    assert not [check for check in found.values() if check.is_wrong]
    absent = {name for name, check in found.items() if check.status is CheckStatus.NOT_HERE}
    assert absent == {"driver", "GPUs", "GPU links", "NCCL", "NVSHMEM", "RDMA", "NCCL interface"}
    assert found["processor"].text.endswith("cores, 0.0 GiB of memory free")
    assert found["huge pages"].text == "transparent: madvise; 7 reserved (none needed)"


def test_the_node_that_listens_holds_all_ranks_requests_and_the_others_need_no_port(machine: Machine) -> None:
    elsewhere = options(host="10.9.9.9")  # no address of this machine
    of_all, own = (
        by_name(
            doctor.check_machine(machine, CPU, elsewhere, num_ranks=2, num_nodes=256, has_front=has_front)
        )
        for has_front in (True, False)
    )
    assert of_all["HTTP"].status is CheckStatus.FAILURE
    assert (
        of_all["open files"].status is CheckStatus.WARNING
        and "32,768 concurrent requests" in of_all["open files"].text
    )
    assert own["HTTP"].status is CheckStatus.NOT_HERE and not own["open files"].is_wrong


def test_gpus_their_driver_links_and_libraries_are_told(machine: Machine, tmp_path: Path) -> None:
    write(
        tmp_path,
        {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun\n"},
    )
    found = by_name(doctor.check_gpus(machine, GPUS))
    assert found["driver"].text == "NVIDIA 580.65.06"
    assert found["GPUs"].text.startswith("3: NVIDIA H200 with 140.0 GiB free, ")
    assert found["GPU links"].text == "all 3 GPUs can access each other's memory"
    assert found["NCCL"].text == "2.28.9"


def test_a_driver_whose_gpus_cannot_be_used_is_a_warning(machine: Machine, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release"
        },
    )
    found = by_name(
        doctor.check_gpus(machine, replace(CPU, reason="torch 2.13.0+cpu was built without CUDA"))
    )
    assert found["driver"].text == "NVIDIA 580.65.06"
    assert found["GPUs"].status is CheckStatus.WARNING and "built without CUDA" in found["GPUs"].text


def test_gpus_that_do_not_reach_each_other_are_named(machine: Machine) -> None:
    apart = replace(GPUS, facts=replace(FACTS, apart=((0, 2), (1, 2)), nccl=""))
    found = by_name(doctor.check_gpus(machine, apart))
    assert (
        found["GPU links"].status is CheckStatus.WARNING and "(0 and 2, 1 and 2)" in found["GPU links"].text
    )
    assert found["NCCL"].status is CheckStatus.FAILURE


WRONG: list[tuple[str, Callable[[Machine, Path], Check], CheckStatus, str]] = [
    (
        "few files",
        lambda m, _: doctor.check_open_files(replace(m, limit_of=lambda _: 256), options(), 2),
        CheckStatus.WARNING,
        "limit 256, but 128 concurrent requests need about 416: ulimit -n 512",
    ),
    (
        "small /dev/shm",
        lambda m, _: doctor.check_shared_memory(replace(m, shared_bytes=lambda _: 64 << 20), num_gpus=8),
        CheckStatus.WARNING,
        "NCCL between 8 GPUs may need more: docker run --shm-size=8g",
    ),
    (
        "no /dev/shm",
        lambda m, root: doctor.check_shared_memory(replace(m, dev=root / "no"), num_gpus=0),
        CheckStatus.WARNING,
        "is missing: mount a tmpfs there",
    ),
    (
        "few ports",
        lambda m, root: (
            write(root, {"proc/sys/net/ipv4/ip_local_port_range": "60000 60100"}),
            doctor.check_ports(m),
        )[1],
        CheckStatus.WARNING,
        "from 60000 to 60100, a small range",
    ),
    (
        "RDMA port down",
        lambda m, root: (add_rdma(root, state="1: DOWN"), doctor.check_rdma(m))[1],
        CheckStatus.WARNING,
        "mlx5_0 port 1 is DOWN: check cables",
    ),
    (
        "RDMA without its devices",
        lambda m, root: (add_rdma(root, has_devices=False), doctor.check_rdma(m))[1],
        CheckStatus.WARNING,
        "infiniband is missing: pass the devices to the container",
    ),
    (
        "RDMA may not lock",
        lambda m, root: (add_rdma(root), doctor.check_locked_memory(m))[1],
        CheckStatus.WARNING,
        "at most 8,192 KiB, but RDMA pins its buffers: ulimit -l unlimited",
    ),
    (
        "old processor",
        lambda m, root: (write(root, {"proc/cpuinfo": "flags : sse2\n"}), doctor.check_processor(m))[1],
        CheckStatus.WARNING,
        "this processor has no AVX2 and no FMA",
    ),
    (
        "a package is missing",
        lambda _m, _: doctor.check_packages(["torch", "no-such-package"]),
        CheckStatus.FAILURE,
        "not installed: no-such-package",
    ),
    (
        "HTTP elsewhere",
        lambda _m, _: doctor.check_http(options(host="198.51.100.1", port=8000)),
        CheckStatus.FAILURE,
        "which is not an address of this machine",
    ),
]


@pytest.mark.parametrize(
    ("make", "status", "says"), [each[1:] for each in WRONG], ids=[each[0] for each in WRONG]
)
def test_each_thing_that_is_wrong_is_said_with_what_to_do(
    make: Callable[[Machine, Path], Check], status: CheckStatus, says: str, machine: Machine, tmp_path: Path
) -> None:
    check = make(machine, tmp_path)
    assert (check.status, says in check.sentence) == (status, True), check.sentence


def test_a_service_that_already_answers_on_the_port_is_a_warning() -> None:
    body = json.dumps({"max_total_num_tokens": 1, "max_running_requests": 1, "context_length": 1}).encode()

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body if self.path == "/server_info" else b"")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Service) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        check = doctor.check_http(options(host="127.0.0.1", port=served.server_port))
        served.shutdown()
    assert check.status is CheckStatus.WARNING
    assert check.sentence.startswith(f"a WideEP service already answers on port {served.server_port}")


def test_rdma_that_works_is_told_by_port_and_rate(machine: Machine, tmp_path: Path) -> None:
    add_rdma(tmp_path)
    check = doctor.check_rdma(machine)
    assert (check.status, check.text) == (CheckStatus.OK, "mlx5_0 port 1 InfiniBand 400 Gb/sec (4X NDR)")
    unlimited = replace(machine, limit_of=lambda _which: resource.RLIM_INFINITY)
    assert doctor.check_locked_memory(unlimited).status is CheckStatus.OK


def test_a_version_outside_of_what_our_distribution_asks_for_is_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda name: {"transformers": "6.0.1"}.get(name, "99.0"))
    check = doctor.check_packages(["torch", "transformers", "numpy"])
    assert check.status is CheckStatus.FAILURE
    assert check.text.startswith("transformers is 6.0.1, but <6,>=5.")


@pytest.mark.parametrize(
    ("version", "status", "said"),
    [
        ("5.25.0", CheckStatus.WARNING, "5.25.0 is newer than 5.24"),
        ("5.20.0", CheckStatus.FAILURE, "5.20.0 is not supported"),
    ],
)
def test_a_transformers_that_is_not_tested_is_told(
    version: str, status: CheckStatus, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version_of", lambda _: version)
    check = doctor.check_packages(["torch", "transformers"])
    assert check.status is status and said in check.text


def test_a_start_says_only_what_is_wrong(machine: Machine) -> None:
    assert doctor.problems_at_start(options(), num_ranks=2, has_other_nodes=True, machine=machine) == []
    at_home = replace(machine, resolve=lambda _host: "127.0.1.1", limit_of=lambda _which: 64)
    alone = doctor.problems_at_start(options(), num_ranks=2, has_other_nodes=False, machine=at_home)
    assert [check.name for check in alone] == ["open files"]
    several = doctor.problems_at_start(options(), num_ranks=2, has_other_nodes=True, machine=at_home)
    assert [check.name for check in several] == ["open files", "gloo interface"]
    assert "set GLOO_SOCKET_IFNAME=eth0 (10.0.0.7) on this node" in several[1].sentence


def test_more_fronts_than_cores_are_a_warning() -> None:
    assert doctor.check_fronts(options(), 1).status is CheckStatus.OK
    assert doctor.check_fronts(replace(options(), api_server_count=2), 2).status is CheckStatus.OK
    check = doctor.check_fronts(replace(options(), api_server_count=3), 2)
    assert check.status is CheckStatus.WARNING
    assert check.sentence == "3 on 2 cores, so they slow each other down: --api-server-count 2 or less"


def test_a_models_files_and_its_memory_at_n_ranks_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = replace(options(), model=str(write_checkpoint(tmp_path / "model")), device="cpu")
    of = lambda: list(doctor.check_model(fits, pool_sizes=[4, 4], num_ranks=4, gpu_bytes=None))  # noqa: E731
    files, memory = of()
    assert files.text == "mixtral, 1 weight file of 0.0 GiB, complete"
    assert memory.text.startswith("each of 4 ranks holds 0.0 GiB of weights; ")
    monkeypatch.setattr("server.serve.preflight.checks.available_bytes", lambda: 1 << 20)
    assert of()[1].status is CheckStatus.FAILURE and "2 ranks on this node would need about" in of()[1].text
    (tmp_path / "model" / "model.safetensors").write_bytes(b"cut")
    assert [check.status for check in of()] == [CheckStatus.FAILURE]
