"""Question: which tiles are fastest on this GPU for the shapes of known models, and by how much?

Expected: decode is bound by bytes, so a tile wins by keeping more loads in flight; prefill is bound by its products, so by
registers and shared memory. Every candidate is checked against float32 before it is timed. A candidate is written only if it
is at least 2 % faster than the kernel's own choice.

Run: `python -m benchmarks.tune_kernels [--table attention/gpu/tiles.json] [--only decode]` on a machine with the GPU. The
whole table is read and written; entries of other devices and kernels do not change. Tiles determine the order in which numbers
are added: a new table changes the last bits of every answer, for all ranks at once (see `attention.gpu.tiles`).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from attention.gpu.tiles import TABLE
from benchmarks.card import print_tail
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels.tile_times import (
    Table,
    best_of,
    fields_of,
    try_all,
    tuned,
    with_entry,
    write_table,
)
from benchmarks.gpu.results import Setting


def main() -> None:
    """Tune, print and write."""
    args = _parse()
    setting = Setting(device=args.device, is_tiny=args.device == "interpreter")
    bench = Bench.of(setting)
    device = "interpreter" if setting.is_interpreted else torch.cuda.get_device_name(bench.device)
    table: Table = json.loads(args.table.read_text()) if args.table.is_file() else {}
    found: dict[str, Any] = {}
    for name, case in tuned(setting, bench).items():
        if args.only not in name:
            continue
        best = best_of(list(try_all(bench, case)))
        if best is None:
            print(f"{name}: its own choice", flush=True)
            continue
        fields = fields_of(best.tile, case.choice)
        found[name] = {"tile": fields, "times": round(best.times, 3)}
        print(f"{name}: {fields}, {best.times:.3f} times as fast", flush=True)
        table = with_entry(table, (device, case.kernel, case.shape), best.tile)
        write_table(args.table, table)  # immediately: access to the device may end at any time
    print_tail({"device": device, "table": args.table.name, "found": found})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_kernels", description="Choose tiles.")
    parser.add_argument("--device", choices=("cuda", "interpreter"), default="cuda")
    parser.add_argument("--table", type=Path, default=TABLE, help="table to write (default: %(default)s)")
    parser.add_argument("--only", default="", help="tune only kernels with this in their name")
    return parser.parse_args()


if __name__ == "__main__":
    main()
