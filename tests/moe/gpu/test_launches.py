"""What a decode step launches per layer. The bounds may only fall: launches, not bytes, are the cost of small steps."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu.launches import counting_launches
from tests.support.gpu.path import Part, build_interpreted, run_steps
from tests.support.models.families import make_model
from tests.support.ranks import RankPool

# Per layer with experts, in bfloat16. Casts of routers' weights are included.
MOST = {"qwen3_moe": 12, "gpt_oss": 12, "deepseek_v3": 22}
# Contexts here fit into one split. Longer ones need `merge_parts` in addition.
ATTENTION = {
    "qwen3_moe": ("norm_rows", "aten::linear", "prepare_heads", "attend_splits", "aten::linear", "norm_rows"),
    "gpt_oss": ("norm_rows", "aten::linear", "prepare_heads", "attend_splits", "aten::linear", "norm_rows"),
    "deepseek_v3": (
        "norm_rows", "aten::linear", "norm_rows", "aten::linear", "prepare_latent_rows", "aten::bmm", "aten::cat",
        "attend_latent_splits", "aten::bmm", "aten::flatten.using_ints", "aten::linear", "norm_rows",
    ),
}  # fmt: skip


def launched(directory: Path) -> list[str]:
    """Return what a step of two decodes launches. The interpreter's wrong rounding of bfloat16 does not matter here."""
    built = build_interpreted(directory, dtype="bfloat16")
    sequences = [list(range(3, 8)), list(range(13, 18))]
    run_steps(built, sequences, [[Part(0, 0, 4)], [Part(1, 0, 4)]])
    with counting_launches() as names:
        run_steps(built, sequences, [[Part(0, 4, 5), Part(1, 4, 5)]])
    return names


@pytest.mark.slow
@pytest.mark.parametrize("family", list(MOST))
def test_a_layer_of_a_decode_step_launches_no_more_than_before(
    family: str, interpreter: RankPool, tmp_path: Path
) -> None:
    found = []
    for layers in (2, 3):
        options: dict[str, Any] = {"num_hidden_layers": layers}
        if family == "gpt_oss":
            options["layer_types"] = ["full_attention"] * layers
        make_model(family, **options).save_pretrained(tmp_path / f"{layers}")
        found.append(interpreter.run(launched, tmp_path / f"{layers}", timeout_s=300.0)[0])

    fewer, more = found
    assert len(more) - len(fewer) <= MOST[family], Counter(more) - Counter(fewer)
    sequence, wanted = tuple(more), ATTENTION[family]
    starts = range(len(sequence))
    assert sum(sequence[at : at + len(wanted)] == wanted for at in starts) == 3, more
