"""An engine whose weights are drawn: it serves, alike every time, and other names of formats are refused."""

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from scheduler.policy.config import ConfigError
from tests.support.serving import build, request, serve

CONFIG = Qwen3MoeConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, max_position_embeddings=64, eos_token_id=None,
)  # fmt: skip


@pytest.mark.slow
def test_an_engine_serves_drawn_weights_from_a_folder_that_has_none(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    answers = []
    for _ in range(2):
        built = build(tmp_path, load_format="random", max_num_seqs=2)
        answers.append(serve(built, [request("a", [1, 2, 3], max_tokens=6)]).token_ids["a"])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 6
    assert built.model.checkpoint.bytes_read > 0


def test_a_format_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    CONFIG.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="load_format is 'dummy'; it must be auto or random"):
        build(tmp_path, load_format="dummy")
