"""The child process that converts the weights: `python -m moe.demo_model.build --gguf G --licence L --out DIR`.

Writes reports to its standard output, one per line: the finished share of the work, a tab, the stage. If the parent
dies, the pipe closes, and the next report ends this process.
"""

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from torch import Tensor

from moe.demo_model.calibration import build_calibration, record_mlp_inputs
from moe.demo_model.checkpoint import build_tokenizer, write_checkpoint, write_tokenizer
from moe.demo_model.conversion import DenseMlp, MoeMlp, Recipe, convert_mlp
from moe.demo_model.gguf_weights import DenseModel, dense_llama, read_dense_model
from moe.demo_model.source import Report

# Start of each stage, as a share of the measured time.
READING, CHATTING, CALIBRATING, CONVERTING, WRITING = 0.0, 0.15, 0.45, 0.70, 0.95


def build_model(gguf: Path, licence: Path, out: Path, report: Report) -> None:
    """Make the checkpoint in `out`, an existing folder."""
    report("reading the weights", READING)
    dense = read_dense_model(gguf)
    recipe = Recipe()
    layers = convert_layers(dense, recipe, report)
    report("writing the checkpoint", WRITING)
    write_checkpoint(out, dense.config, dense.weights, layers, recipe)
    write_tokenizer(dense.vocabulary, dense.config.max_position_embeddings, out)
    shutil.copyfile(licence, out / "LICENSE")


def convert_layers(dense: DenseModel, recipe: Recipe, report: Report) -> list[MoeMlp]:
    """Calibrate, and convert every layer but the first."""
    model = dense_llama(dense)
    calibration = build_calibration(
        model,
        build_tokenizer(dense.vocabulary),
        chat_renderer(dense.vocabulary.chat_template),
        _part(report, "writing calibration chats", CHATTING, CALIBRATING),
    )
    progress = _part(report, "calibrating", CALIBRATING, CONVERTING)
    inputs = record_mlp_inputs(model, calibration.ids, progress)
    is_code_N = calibration.is_code.repeat_interleave(calibration.ids.shape[1])
    progress = _part(report, "converting layers", CONVERTING, WRITING)
    layers = []
    for layer, x_ND in enumerate(inputs[1:], start=1):
        layers.append(convert_mlp(layer_mlp(dense.weights, layer), x_ND, is_code_N, recipe))
        progress(layer / (len(inputs) - 1))
    return layers


def layer_mlp(weights: dict[str, Tensor], layer: int) -> DenseMlp:
    """Return a layer's MLP from weights with transformers' names."""
    gate, up, down = (
        weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
    )
    return DenseMlp(gate, up, down)


def chat_renderer(chat_template: str) -> Callable[[str], str]:
    """Return a function that puts one user prompt into a chat template, ready for the answer."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(chat_template)

    def render(prompt: str) -> str:
        return template.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)

    return render


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description="Convert SmolLM2-135M-Instruct into WideEP's demo model.")
    for flag in ("--gguf", "--licence", "--out"):
        parser.add_argument(flag, type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads change the order of sums, which may decide a token's cluster
    torch.use_deterministic_algorithms(True)
    build_model(args.gguf, args.licence, args.out, _print_report)


def _print_report(stage: str, fraction: float) -> None:
    sys.stdout.write(f"{fraction:.4f}\t{stage}\n")
    sys.stdout.flush()


def _part(report: Report, stage: str, start: float, end: float) -> Callable[[float], None]:
    """Return a report function for a stage that runs from `start` to `end` of the whole. Reports its start at once."""
    report(stage, start)
    return lambda share: report(stage, start + share * (end - start))


if __name__ == "__main__":
    main()
