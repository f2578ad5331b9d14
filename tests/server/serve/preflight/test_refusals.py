"""Every start that preflight refuses, with its message, in one table."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from expert_placement.files import save_placement
from moe.demo_model import DemoModelError
from server.options.table import Options
from server.serve.preflight.checks import check_start
from server.serve.preflight.device import GpuFacts, choose_device, on_device
from server.serve.preflight.model import resolve_model
from tests.server.serve.preflight.test_device import GOOD
from tests.support.models.fake_checkpoint import write_checkpoint
from tests.support.placement.placements import random_placement
from tests.support.service.starts import complaint_of, options_for

Refused = Callable[[Path], object]  # receives an empty directory and performs the action to be refused


def check(options: Options, num_ranks: int = 2) -> None:
    """Check as serve does."""
    check_start(options, pool_sizes=[num_ranks] * num_ranks, has_front=True)


def start(*flags: str, num_ranks: int = 2, **config: object) -> Refused:
    """Check a start of a good model with these flags and changed fields of its config."""
    return lambda directory: check(options_for(write_checkpoint(directory, **config), *flags), num_ranks)


def start_with(name: str, content: str | bytes | None) -> Refused:
    """Check a start of a good model with one file replaced, or removed if `content` is None."""

    def run(directory: Path) -> None:
        path = write_checkpoint(directory) / name
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        check(options_for(directory))

    return run


def other_format(directory: Path) -> None:
    (write_checkpoint(directory) / "model.safetensors").rename(directory / "pytorch_model.bin")
    check(options_for(directory))


def cut_download(directory: Path) -> None:
    file = write_checkpoint(directory) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    check(options_for(directory))


def missing_file_of_two(directory: Path) -> None:
    (write_checkpoint(directory) / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    check(options_for(directory))


def file_for_a_directory(directory: Path) -> None:
    (directory / "file").touch()
    check(options_for(directory / "file"))


def placement_of(*sizes: int) -> Refused:
    """Check a start with a placement of these sizes: layers, experts, ranks and slots."""

    def run(directory: Path) -> None:
        save_placement(random_placement(*sizes, seed=1), directory / "placement.json")
        start(f"--expert-placement={directory}/placement.json")(directory)

    return run


def load_for_a_placement(directory: Path) -> None:
    with (directory / "placement.json").open("wb") as archive:
        np.savez(archive, load=np.ones((3, 1, 4)))
    start(f"--expert-placement={directory}/placement.json")(directory)


def no_placement(directory: Path) -> None:
    start(f"--expert-placement={directory}/placement.json")(directory)


def port_in_use(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        start(f"--port={server.getsockname()[1]}")(directory)


def gpu_without_driver(_directory: Path) -> None:
    choose_device("cuda", lambda: (GpuFacts(), "the NVIDIA driver supports CUDA 12.4"))


def more_ranks_than_gpus(directory: Path) -> None:
    on_device(options_for(directory), choose_device("cuda", lambda: (GOOD, "")), num_local_ranks=3)


def patched(target: str, name: str, value: object, run: Refused) -> Refused:
    """Run a check with an attribute of a module replaced."""

    def run_patched(directory: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)
            patch.setattr(f"{target}.{name}", value)
            run(directory)

    return run_patched


def fail_with(error: Exception) -> Callable[..., object]:
    """Return a function that always raises an error."""

    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


DENSE = "is not a Mixture-of-Experts model: its config.json (model_type 'mixtral') does not set any of"
NO_SAFETENSORS = "model.safetensors is not a safetensors file"
BACKEND = "--all2all-backend is nvshmem, which cannot be used: "
NO_ANSWER = httpx.Response(403, request=httpx.Request("GET", "http://hub"))
REFUSALS: list[tuple[str, Refused, tuple[str, ...]]] = [
    ("no directory", lambda at: check(options_for(at / "none")), ("the model path ", "/none does not exist")),
    ("no such path", lambda at: resolve_model(str(at / "none")), ("the model path ", "/none does not exist")),
    ("no hub", patched("huggingface_hub", "snapshot_download", fail_with(OSError("no route to the hub\nsecond line")),
                       lambda _: resolve_model("org/name")),
     ("the model 'org/name' is not a local directory, and the download from the hub failed (OSError: no route to the hub). Use",)),
    ("offline", patched("huggingface_hub", "snapshot_download", fail_with(LocalEntryNotFoundError("x")),
                        lambda _: resolve_model("org/name")), ("the hub cannot be reached (no network, or HF_HUB_OFFLINE",)),
    ("gated", patched("huggingface_hub", "snapshot_download", fail_with(GatedRepoError("x", response=NO_ANSWER)),
                      lambda _: resolve_model("org/name")), ("accept its licence: do so on the model's page and set HF_TOKEN",)),
    ("private", patched("huggingface_hub", "snapshot_download", fail_with(RepositoryNotFoundError("x", response=NO_ANSWER)),
                        lambda _: resolve_model("org/name")), ("check the name, or set HF_TOKEN",)),
    ("no demo model", patched("moe.demo_model", "ensure_demo_model", fail_with(DemoModelError("the disk is full")),
                              lambda _: resolve_model("demo")),
     ("the demo model could not be made: the disk is full",)),
    ("a file", file_for_a_directory, ("/file is a file; use the directory that contains config.json",)),
    ("no config", start_with("config.json", None), ("is not a model directory: it has no config.json",)),
    ("cut config", start_with("config.json", "{"), ("config.json is not valid JSON",)),
    ("no text", start_with("config.json", b"\xff"), ("config.json is not valid JSON",)),
    ("list for config", start_with("config.json", "[]"), ("config.json is not a JSON object",)),
    ("no experts named", start(num_local_experts=None), (DENSE, "WideEP serves MoE models only")),
    ("no experts", start(num_local_experts=0), (DENSE,)),
    ("one expert", start(num_local_experts=1), (DENSE,)),
    ("too long", start("--max-model-len=129"), ("--max-model-len is 129; the model's limit is 128 tokens",)),
    ("gptq", start(quantization_config={"quant_method": "gptq", "bits": 3, "group_size": 128}),
     ("cannot be served: the checkpoint is quantised as gptq with bits = 3",)),
    ("bitsandbytes", start(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
     ("cannot be served: the checkpoint is quantised with bitsandbytes (bitsandbytes: its codes index a table of values",)),
    ("ModelOpt", start_with("hf_quant_config.json", '{"quantization": {"quant_algo": "W4A8_AWQ"}}'),
     ("cannot be served: the checkpoint is quantised as modelopt with quant_algo = 'W4A8_AWQ'",)),
    ("no weights", start_with("model.safetensors", None), ("has no .safetensors weights. Download or save",)),
    ("other format", other_format,
     ("has no .safetensors weights; it has pytorch_model.bin, in a format that WideEP does not read",)),
    ("weights missing", missing_file_of_two,
     ("1 of the 2 weight files listed in ", "are missing: model-2.safetensors. Download the model again")),
    ("no index", start_with("model.safetensors.index.json", "[]"), ("is not a safetensors index",)),
    ("cut weights", cut_download, (" bytes, but its header implies ", "Download it again")),
    ("empty weights", start_with("model.safetensors", b""), (NO_SAFETENSORS,)),
    ("git-lfs pointer", start_with("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
     (NO_SAFETENSORS, "perhaps a git-lfs pointer")),
    ("header without end", start_with("model.safetensors", b"\x02\0\0\0\0\0\0\0{}"), (NO_SAFETENSORS,)),
    ("gpu backend", start("--all2all-backend=nvshmem"), (BACKEND, "; use auto, gloo or shm")),
    ("gpu backend, no model", lambda at: check(options_for(at / "none", "--all2all-backend=nvshmem")), (BACKEND,)),
    ("local for two", start("--all2all-backend=local"), ("it supports one: use auto, gloo or shm",)),
    ("nodes not filled", start("--dispatch-node-size=4", num_ranks=6),
     ("--dispatch-node-size is 4, which does not divide 6 ranks; use one of [1, 2, 3, 6], or 0",)),
    ("no mtp layers", start('--speculative-config={"method": "mtp", "num_speculative_tokens": 2}'),
     ("--speculative-config: mixtral: ", "has no layers for multi-token prediction", "use the method ngram or suffix")),
    ("compiler on a cpu", start("--enable-torch-compile", "--device=cpu"), ("is for GPUs",)),
    ("rows in FP8 on a cpu", start("--activation-dtype=fp8", "--device=cpu"), ("is for GPUs",)),
    ("no gpu", gpu_without_driver,
     ("--device is cuda, but it is unusable: the NVIDIA driver supports CUDA 12.4; or use --device cpu",)),
    ("too few gpus", more_ranks_than_gpus,
     ("3 ranks on a node with 2 GPUs, but each rank needs its own GPU; use --data-parallel-size 2 or less",)),
    ("placement of other layers", placement_of(2, 4, 2, 3),
     ("--expert-placement: ", "is a placement for 2 layers of 4 experts on 2 ranks, but this service has 1 layers of 4")),
    ("placement of other experts", placement_of(1, 5, 2, 3),
     ("--expert-placement: ", "of 5 experts on 2 ranks, but this service has 1 layers of 4 experts on 2 ranks. Plan a new one")),
    ("placement of other ranks", placement_of(1, 4, 4, 2),
     ("--expert-placement: ", "on 4 ranks, but this service has 1 layers of 4 experts on 2 ranks")),
    ("load for a placement", load_for_a_placement,
     ("is not a placement: placements are JSON; this is an archive, such as a recorded load",)),
    ("no placement", no_placement, ("--expert-placement: ", "cannot be read: No such file")),
    ("too little memory", patched("server.serve.preflight.checks", "available_bytes", lambda: 1 << 20, start()),
     ("2 ranks on this node would need about ", " is free. Each rank holds ", "Use fewer ranks per node")),
    ("tier beyond memory", patched("server.serve.preflight.checks", "available_bytes", lambda: 1 << 34,
                                   start("--kv-offloading-size=20", "--device=cpu")),
     ("--kv-offloading-size is 20.0 GiB, but ", " of host memory is free after the ", "give a smaller size")),
    ("tier beyond the disk", patched("server.serve.preflight.tiers", "free_at", lambda _path: 1 << 30,
                                     start("--kv-offloading-dir=kv", "--kv-offloading-disk-size=2")),
     ("--kv-offloading-disk-size is 2.0 GiB, but the disk of ", "/kv has 1.0 GiB free; give a smaller size")),
    ("port in use", port_in_use, ("port ", " on 127.0.0.1 is in use by another program; choose another --port")),
    ("other host", start("--host=192.0.2.1"), ("--host is '192.0.2.1', which is not an address of this machine",)),
    ("no host", start("--host=no such host.invalid"),
     ("--host is 'no such host.invalid', which is not an address of this machine",)),
]  # fmt: skip


@pytest.mark.crossed("refused", every=2)
@pytest.mark.usefixtures("much_memory")
@pytest.mark.parametrize(("refused", "said"), [row[1:] for row in REFUSALS], ids=[row[0] for row in REFUSALS])
def test_a_start_that_cannot_work_is_refused_and_says_why(
    tmp_path: Path, refused: Refused, said: tuple[str, ...]
) -> None:
    complaint = complaint_of(lambda: refused(tmp_path))
    assert all(part in complaint for part in said), complaint
