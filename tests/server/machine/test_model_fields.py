"""The fields about experts in config.json, under every family's names, and their form for Ollama's clients."""

from types import SimpleNamespace
from typing import Any

import pytest

from server.api.ollama.card import ModelCard
from server.api.served import ServedModel
from server.front.tokenizer import TemplateFacts
from server.machine.model_fields import experts_per_token, num_experts


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2)),  # Mixtral
        ({"n_routed_experts": 256, "num_experts_per_tok": 8}, (256, 8)),  # DeepSeek
        ({"moe_num_experts": 64, "moe_k": 6}, (64, 6)),  # ERNIE 4.5
        ({"num_experts": [4, 16], "moe_topk": [1, 2]}, (16, 2)),  # Hunyuan, a count per layer
        ({"text_config": {"num_experts": 128, "top_k_experts": 8}}, (128, 8)),  # Gemma 4
        ({"text_config": None, "llm_config": {"num_experts": 4}}, (4, 0)),
        ({"hidden_size": 8}, (0, 0)),
    ],
)
def test_experts_are_counted_under_every_name(config: dict[str, Any], counts: tuple[int, int]) -> None:
    assert (num_experts(config), experts_per_token(config)) == counts
    nothing: Any = None
    tokenizer: Any = SimpleNamespace(template=TemplateFacts())
    model = ServedModel(
        names=("m",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: 9,
        created=0,
        structures=nothing,
    )
    card = ModelCard(model=model, config={"model_type": "m", **config}, num_bytes=0, digest="")
    told = card.shown()["model_info"]
    assert (told.get("m.expert_count", 0), told.get("m.expert_used_count", 0)) == counts
