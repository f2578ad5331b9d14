"""Which published configurations a start accepts on CPUs and on GPUs, and the result of `wideep size` for each.

`python -m server.tools.size.configurations FOLDER` prints the rows of docs/published.md that have figures. A folder contains
each model's config.json in its own folder (OWNER/NAME/config.json), or all files together as OWNER--NAME_config.json, with
ModelOpt's hf_quant_config.json next to it for models that have one. Weights are not needed: the check is the part of a start that
reads only these files, so problems that only weights show (a missing tensor, scales without codes) are not in the table.
Rejected: keeping the configurations in this repository, because they have many different licences.
"""

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moe.families import UnsupportedModelError
from moe.load.quantisation import (
    MODELOPT_FILE,
    UnservedQuantisationError,
    find_configuration,
    read_quantisation,
)
from scheduler.policy.config import ConfigError
from server.front.images.seeing import IMAGE_TYPES
from server.machine.model_fields import field_of
from server.serve.preflight.model import PreflightError, check_is_moe, read_config
from server.tools.size.costs.fit import SizeError
from server.tools.size.costs.read_model import ReadModel, read_model
from server.tools.size.flags import SIZE, SizeOptions
from server.tools.size.size import size

_CONFIG = "config.json"
_LONGEST_REASON = 240
_COLUMNS = (
    "model", "type", "quantisation", "CPU", "GPU", "weights, GB", "on every rank, GB", "fewest ranks of {device}", "why not",
)  # fmt: skip


class ConfigurationVerdict(NamedTuple):
    """The result for one configuration."""

    name: str
    model_type: str
    quantisation: str
    on_cpu: str  # yes, images (and text), text (only the text decoder of a model with towers) or no
    on_gpu: str
    weights_gb: float | None  # None without an estimate
    shared_gb: float | None
    ranks: int | None
    reason: str


def judge_all(folder: Path, device: str) -> tuple[list[ConfigurationVerdict], int]:
    """Return the verdicts on all configurations in a folder, and the number of models that are not Mixture-of-Experts."""
    found, num_dense = [], 0
    for name, files in sorted(_configurations(folder)):
        with tempfile.TemporaryDirectory(prefix="wideep_config_") as made:
            directory = Path(made)
            for target, source in files.items():
                shutil.copy(source, directory / target)
            try:
                check_is_moe(read_config(directory), directory)
            except PreflightError:
                num_dense += 1
                continue
            found.append(judge(name, directory, device))
    return found, num_dense


def judge(name: str, directory: Path, device: str) -> ConfigurationVerdict:
    """Return the verdict on one configuration; `wideep size` counts its ranks of a GPU with this name."""
    config = read_config(directory)
    served = _served_part(config)
    on_cpu, on_gpu = (_read(directory, on_gpu=each) for each in (False, True))
    weights = shared = ranks = None
    reason = next((each for each in (on_cpu, on_gpu) if isinstance(each, str)), "")
    if not isinstance(on_gpu, str):
        weights, shared = (on_gpu.weights.shared + on_gpu.weights.experts) / 1e9, on_gpu.weights.shared / 1e9
        try:
            ranks = _fewest_ranks(directory, device)
        except (ConfigError, SizeError) as error:
            reason = f"size: {error}"
    said = (
        reason.replace(f"{directory} cannot be served: ", "")
        .replace(f"{directory}/", "")
        .replace(str(directory), name)
        .replace("|", "\\|")
    )
    return ConfigurationVerdict(
        name=name,
        model_type=str(config.get("model_type")),
        quantisation=_quantisation(directory, config),
        on_cpu="no" if isinstance(on_cpu, str) else served,
        on_gpu="no" if isinstance(on_gpu, str) else served,
        weights_gb=weights,
        shared_gb=shared,
        ranks=ranks,
        reason=_shortened(said),
    )


def table(verdicts: Sequence[ConfigurationVerdict], num_dense: int, device: str) -> str:
    """Return a Markdown table, with a line of totals below it."""
    head = [each.format(device=device) for each in _COLUMNS]
    rows = [head, ["---"] * len(head), *(_row(each) for each in verdicts)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    on_cpu, on_gpu = (
        sum(each != "no" for each in column)
        for column in zip(*((v.on_cpu, v.on_gpu) for v in verdicts), strict=True)
    )
    sized = sum(each.ranks is not None for each in verdicts)
    lines += [
        "",
        f"{len(verdicts)} configurations of Mixture-of-Experts models: {on_cpu} are accepted on CPUs, {on_gpu} on GPUs, and "
        f"`wideep size` finds a number of ranks for {sized}. {num_dense} configurations of other models are omitted.",
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m server.tools.size.configurations", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--device", default="h200", metavar="GPU", help="device of `wideep size` (default: %(default)s)"
    )
    args = parser.parse_args(words)
    verdicts, num_dense = judge_all(args.folder, args.device)
    if not verdicts:
        parser.error(f"{args.folder} has no config.json of a Mixture-of-Experts model")
    print(table(verdicts, num_dense, args.device))
    return 0


def _configurations(folder: Path) -> Iterator[tuple[str, dict[str, Path]]]:
    """Yield each model's name and files, with the names that the files have in a model's directory."""
    for path in folder.rglob(f"*{_CONFIG}"):
        begin = path.name.removesuffix(_CONFIG)
        if begin and not (begin.endswith("_") and "--" in begin):
            continue  # a tokenizer's, a generation config or ModelOpt's
        if begin.endswith("_hf_quant_"):
            continue
        name = begin.rstrip("_").replace("--", "/") or path.parent.relative_to(folder).as_posix()
        modelopt = path.with_name(f"{begin}{MODELOPT_FILE}")
        yield name, {_CONFIG: path, **({MODELOPT_FILE: modelopt} if modelopt.is_file() else {})}


def _read(directory: Path, *, on_gpu: bool) -> ReadModel | str:
    """Read a model for a kind of device. Returns the message if it is refused."""
    try:
        return read_model(directory, on_gpu=on_gpu, float_bytes=2)
    except (ConfigError, PreflightError, UnsupportedModelError) as error:
        return str(error)


def _fewest_ranks(directory: Path, device: str) -> int:
    parser = argparse.ArgumentParser()
    SIZE.add_flags(parser)
    args = parser.parse_args([str(directory), "--device", device])
    return size(args, SizeOptions.of(args)).chosen.num_ranks


def _served_part(config: dict[str, Any]) -> str:
    if config.get("model_type") in IMAGE_TYPES:
        return "images"
    return "text" if isinstance(config.get("text_config"), dict) else "yes"


def _quantisation(directory: Path, config: dict[str, Any]) -> str:
    configured = find_configuration(directory, field_of(config, "quantization_config"))
    method = str((configured or {}).get("quant_method", "-"))
    try:
        found = read_quantisation(configured)
    except UnservedQuantisationError:
        return method
    return method if found is None or found.names == method else f"{method}: {found.names}"


def _shortened(reason: str) -> str:
    """Return the reason without the remedy and the supported values."""
    for behind in ("; supported: ", "; use ", ". "):
        reason = reason.partition(behind)[0]
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON].rpartition(' ')[0]} ..."


def _row(verdict: ConfigurationVerdict) -> list[str]:
    numbers = [
        "-" if verdict.weights_gb is None else f"{verdict.weights_gb:.0f}",
        "-" if verdict.shared_gb is None else f"{verdict.shared_gb:.1f}",
        "-" if verdict.ranks is None else str(verdict.ranks),
    ]
    return [
        verdict.name,
        f"`{verdict.model_type}`",
        verdict.quantisation,
        verdict.on_cpu,
        verdict.on_gpu,
        *numbers,
        verdict.reason,
    ]


if __name__ == "__main__":
    raise SystemExit(main())
