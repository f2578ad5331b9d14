"""How much does a draft of a model's own layer cost compared with one of its decoder layers?

One rank decodes with DeepSeek-V3's and Qwen3-Next's shapes (attention in all layers), with random weights that are not on
disk. The same shape is also built with fewer layers. The difference of the step times is the time of the layers; the rest of a
step is its ends, mostly the output projection. Then the layer for multi-token prediction drafts after each step, one row per
sequence. Its logits are first checked to have the same bits as those of its modules.

Expected bound: one decoder layer, the ends, and a projection of twice the hidden dim.

Run: `python -m benchmarks.draft_layers [--batch 1,8] [--threads 2] [--context 150] [--save]`.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.random_model import SHAPES, config_of
from benchmarks.profile import NoDoorbell, decode
from kvcache.paged_cache import BLOCK_TOKENS, PagedCache
from moe.mtp.layers import drafting_of
from scheduler.assembly import Assembled, assemble
from scheduler.policy.config import EngineConfig
from scheduler.policy.speculative import Method, SpeculativeConfig

MEASURED = ("deepseek-v3", "qwen3-next-attention")
FEWER = 2  # layers of the smaller twin
_WARM_UPS, _STEPS = 10, 60
Run = Callable[[], Any]


class DraftingRank(NamedTuple):
    """A rank with a drafting layer, its pages, and its number of layers."""

    built: Assembled
    cache: PagedCache
    num_layers: int


def main(arguments: list[str] | None = None) -> int:
    """Print a table and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_layers", description="The cost of a draft and of a decoder layer."
    )
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=150)
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/draft-layers-<date>-<cpu>.json"
    )
    options = parser.parse_args(arguments)
    batches = [int(text) for text in options.batch.split(",")]
    card = environment_card()
    print_card(card)
    names = ("step", "layer", "ends", "draft", "draft / (layer + ends)")
    print(f"\nmedian ms{'':31}" + "".join(f"{name:>24}" for name in names))
    found = {}
    for shape in MEASURED:
        with tempfile.TemporaryDirectory() as directory:
            engines = [
                open_engine(Path(directory) / name, shape, num_layers, max(batches), options)
                for name, num_layers in (("whole", None), ("smaller", FEWER))
            ]
            for batch in batches:
                times = measure(engines, batch, options.context)
                found[f"{shape}, batch {batch}"] = times
                print(
                    f"{shape + f', batch {batch}':40}" + "".join(f"{time:24.3f}" for time in times.values())
                )
    result = {"environment": card, "options": vars(options), "ms": found}
    print_tail({"benchmark": "draft-layers", **result})
    if options.save:
        save_result("draft-layers", {"benchmark": "draft-layers", **result})
    return 0


def open_engine(
    directory: Path, shape: str, num_layers: int | None, batch: int, options: argparse.Namespace
) -> DraftingRank:
    """Build a shape with `num_layers` layers (by default its own number) and one drafting layer."""
    more = {} if num_layers is None else {"num_hidden_layers": num_layers}
    if num_layers is not None and "layer_types" in SHAPES[shape].sizes:
        more["layer_types"] = SHAPES[shape].sizes["layer_types"][:num_layers]
    config = config_of(shape, num_nextn_predict_layers=1, **more)
    config.save_pretrained(directory)
    built = assemble(
        EngineConfig(
            directory=directory, kv_cache_bytes=1 << 30, max_model_len=options.context + 2, max_num_seqs=batch,
            threads=options.threads, load_format="dummy",
            speculative_config=SpeculativeConfig(method=Method.MTP, num_drafts=1),
        ),
        NoDoorbell(),
    )  # fmt: skip
    blocks = batch * (options.context // BLOCK_TOKENS + 1)
    return DraftingRank(
        built, PagedCache(built.model.skeleton.cache_shapes, blocks, 2 * batch), config.num_hidden_layers
    )


def measure(engines: list[DraftingRank], batch: int, context: int) -> dict[str, float]:
    """Return the median milliseconds of a step, one layer, the ends, and a draft; all are measured in turn."""
    steps = [decode(engine.built, engine.cache, batch, context) for engine in engines]
    draft = drafting(engines[0], batch)
    check_bits(engines[0], steps[0], draft)
    runs = [*steps, draft]
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(_WARM_UPS + _STEPS):
        for run, taken in zip(runs, times, strict=True):
            begun_s = time.perf_counter()
            run()
            if turn >= _WARM_UPS:
                taken.append((time.perf_counter() - begun_s) * 1e3)
    whole, smaller, drafted = (statistics.median(taken) for taken in times)
    layer = (whole - smaller) / (engines[0].num_layers - engines[1].num_layers)
    ends = whole - layer * engines[0].num_layers
    return {"step": whole, "layer": layer, "ends": ends, "draft": drafted, "ratio": drafted / (layer + ends)}


def drafting(engine: DraftingRank, batch: int) -> Run:
    """Return a function that drafts after a decode step, one row per sequence, from the step's hidden states."""
    model, step = engine.built.model, engine.built.model.step
    vocabulary = model.lm_head.shape[0]
    tokens = torch.randint(vocabulary, (batch,), generator=torch.Generator().manual_seed(1)).tolist()

    def run() -> Any:
        inputs = step.inputs(tokens, range(batch))
        hidden_T = torch.arange(step.num_padded) % batch
        return model.draft(0, inputs.token_T, engine.cache, inputs.row_R, hidden_T)

    return run


def check_bits(engine: DraftingRank, decode_once: Run, draft: Run) -> None:
    """Check that drafts run as a program, with the same bits as the modules.

    Raises:
        RuntimeError: They do not.
    """
    layers = drafting_of(engine.built.model.net)
    if layers is None or not layers.programs:
        raise RuntimeError("drafts do not run as a program")
    for _ in range(_WARM_UPS):  # until samples of the experts' inputs are kept
        decode_once()
        ours = draft()
    programs = dict(layers.programs)
    layers.programs.clear()
    theirs = draft()
    layers.programs.update(programs)
    if not torch.equal(ours, theirs):
        raise RuntimeError("the drafts of the program differ from those of the modules")


if __name__ == "__main__":
    sys.exit(main())
