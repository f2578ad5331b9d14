"""Experts with scaled inputs use the experts interface if a trial shows that they compute nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from moe.families import UnsupportedModelError, build_on_meta
from moe.model import Skeleton
from moe.scaled_experts import blocks
from tests.support.engines.serving import build, request, serve, teacher_forced
from tests.support.models.families import make_config, write_checkpoint
from tests.support.models.family_sweep import prompts
from tests.support.models.greedy import greedy
from tests.support.models.published_types import write_step

TOLERANCE = 1e-4


def test_every_block_of_a_model_is_exchanged() -> None:
    assert len(blocks(build_on_meta(make_config("llama4")))) == 2
    assert not blocks(build_on_meta(make_config("mixtral")))


def test_a_block_that_scales_what_experts_give_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TD = hidden_states.reshape(-1, block.hidden_dim)
        scores_TE, logits_TE = block.router(x_TD)
        each_ETD = block.experts(x_TD.repeat(scores_TE.shape[1], 1)).view(scores_TE.shape[1], *x_TD.shape)
        return block.shared_expert(x_TD) + (each_ETD * scores_TE.T[..., None]).sum(0), logits_TE

    make_config("llama4").save_pretrained(tmp_path)
    assert Skeleton(tmp_path).experts
    monkeypatch.setattr(Llama4TextMoe, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="its experts do not use the experts interface"):
        Skeleton(tmp_path)


def test_experts_without_the_interface_that_compute_otherwise_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_step(tmp_path, is_wrapped=True)
    assert Skeleton(tmp_path).experts
    own = Step3p7Experts.forward
    monkeypatch.setattr(Step3p7Experts, "forward", lambda experts, *given: own(experts, *given) * 2)
    with pytest.raises(UnsupportedModelError, match="its experts do not use the experts interface"):
        Skeleton(tmp_path)


@pytest.mark.parametrize(
    "budget", [7, *(pytest.param(budget, marks=pytest.mark.slow) for budget in (16, 29, 512))]
)
def test_prompts_longer_than_attentions_chunks_may_be_cut_anywhere(budget: int, tmp_path: Path) -> None:
    """Chunks of 16 tokens, and queries scaled by position, in steps of 8."""
    oracle, sequences = write_checkpoint("llama4", tmp_path), prompts(50, 3, 33, 16, 17)
    built = build(tmp_path, max_model_len=128, max_num_batched_tokens=budget, max_num_seqs=4)
    served = serve(
        built, [request(str(index), prompt, max_tokens=20) for index, prompt in enumerate(sequences)]
    )
    for index, prompt in enumerate(sequences):
        answer = served.token_ids[str(index)]
        assert [*prompt, *answer] == greedy(oracle, prompt, answer, 20)[0]


def test_positions_and_chunks_show_in_logits(tmp_path: Path) -> None:
    """Control of the test above: a model without one of them has other logits."""
    oracle, sequences = write_checkpoint("llama4", tmp_path), prompts(50)
    found = teacher_forced(build(tmp_path, max_model_len=64), sequences)[0]

    def difference() -> float:
        with torch.inference_mode():
            return float(np.abs(found - oracle(torch.tensor(sequences)).logits[0].numpy()).max())

    assert difference() < TOLERANCE
    text = oracle.config.get_text_config()
    text.attention_chunk_size = 17
    assert difference() > 100 * TOLERANCE
    text.attention_chunk_size = 16
    for layer in oracle.get_decoder().model.layers:
        layer.self_attn.attn_temperature_tuning = False
    assert difference() > 100 * TOLERANCE
