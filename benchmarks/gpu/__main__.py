"""Question: how fast are kernels and models on this GPU, compared with its memory and matrix units, with transformers, with
torch's own kernels and with plain float32?

Expected: docs/gpu_day.md explains each row and its bound. Run `benchmarks/gpu_day.sh` (`--minutes N`, `--resume`), or without
a GPU `benchmarks/gpu_day.sh --device interpreter --tiny`, which runs every part on CPU tensors in Triton's interpreter with
tiny shapes: its times are meaningless, its answers are not.
The tables are printed last, so that they are at the end of a long output. The JSON object on the last line counts the units and
rows and names the file with all rows.
"""

import argparse
import functools
import sys
from pathlib import Path
from typing import IO

from benchmarks.card import RESULTS, print_card, print_tail
from benchmarks.gpu.day import PARTS, Day, DayPart, day_lines
from benchmarks.gpu.device_card import NoDeviceError, day_card
from benchmarks.gpu.ranks.worker import Worker
from benchmarks.gpu.results import Ledger, Setting, file_name, source_digest

DEFAULT_MINUTES = 25.0


def main() -> int:
    """Run a day. Return 1 without a GPU, 2 if a row is wrong or a unit failed."""
    args = _parse()
    setting = Setting(device=args.device, is_tiny=args.tiny)
    source = source_digest(Path(__file__).parents[2])
    try:
        card = day_card(setting, source)
    except NoDeviceError as error:
        print(error, file=sys.stderr)
        return 1
    print_card(card)
    path = args.out / file_name(card["device"].split("(")[0], setting, source)
    ledger = Ledger(path, {"environment": card, "setting": setting.as_json()}, resumes=args.resume)
    if args.resume:
        print(f"{ledger.num_done} units in {path} are already done\n", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".log").open("ab") as log:
        worker = functools.partial(_start, log=log)
        say = functools.partial(print, flush=True)
        day = Day(ledger, setting, worker, minutes=args.minutes, wanted=args.units, say=say)
        day.run(args.parts)
    for line in day_lines(ledger.units, args.parts, day.not_reached):
        print(line)
    summary = ledger.summary()
    print()
    print_tail({"results": path.name, "device": card["device"], "commit": card["commit"], **summary})
    return 2 if summary["failed"] or summary["wrong_rows"] else 0


def _start(module: str, setting: Setting, *, log: IO[bytes]) -> Worker:
    return Worker(module, setting, log)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_day.sh", description="A day with a GPU; see docs/gpu_day.md.")
    parser.add_argument("--minutes", type=float, default=DEFAULT_MINUTES, help="total time (%(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="skip units done by the same sources on such a device"
    )
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes small enough for the interpreter")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help="such as ceilings,kernels")
    parser.add_argument(
        "--units", type=lambda text: text.split(","), default=[], metavar="TEXT,...",
        help="only units with one of these texts in their name, such as qwen3",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for results (%(default)s)")
    args = parser.parse_args()
    if args.device == "interpreter" and not args.tiny:
        parser.error("--device interpreter requires --tiny: real shapes would take days")
    return args


def _parts(text: str) -> list[DayPart]:
    by_name = {part.name: part for part in PARTS}
    names = text.split(",")
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown part {', '.join(unknown)}; allowed: {', '.join(by_name)}")
    return [part for part in PARTS if part.name in names]


if __name__ == "__main__":
    sys.exit(main())
