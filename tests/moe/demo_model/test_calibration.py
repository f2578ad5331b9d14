"""Calibration text and the statistics recorded from it."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM

from moe.demo_model.calibration import (
    CHAT_ANSWER_TOKENS,
    CODE_MODULES,
    code_excerpt,
    greedy_chats,
    record_mlp_inputs,
    standard_source,
)
from moe.demo_model.source import DemoModelError
from tests.moe.demo_model import tiny


def tiny_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(None, config=tiny.config(), state_dict=tiny.weights()).eval()


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer in which the word "t7" is token 7."""
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(tiny.VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def test_batched_chats_equal_transformers_generate_one_by_one() -> None:
    model, prompts = tiny_llama(), ["t5 t6 t7", "t9", "t11 t12 t13 t14 t15"]
    reports: list[float] = []
    chats = greedy_chats(model, word_tokenizer(), prompts, reports.append)
    for prompt, chat in zip(prompts, chats, strict=True):
        ids = torch.tensor([word_tokenizer().encode(prompt).ids])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=CHAT_ANSWER_TOKENS, do_sample=False
        )
        assert chat == expected[0].tolist()
    assert reports == sorted(reports) and reports[-1] <= 1.0


def test_mlp_inputs_are_recorded_for_every_layer_and_token_in_order() -> None:
    model = tiny_llama()
    ids = torch.randint(3, tiny.VOCABULARY, (3, 10), generator=torch.Generator().manual_seed(0))
    inputs = record_mlp_inputs(model, ids, lambda share: None)
    assert [tuple(x.shape) for x in inputs] == [(30, tiny.HIDDEN)] * tiny.LAYERS
    one = record_mlp_inputs(model, ids[1:2], lambda share: None)
    torch.testing.assert_close(inputs[2][10:20], one[2])


def test_every_calibration_module_has_enough_source() -> None:
    assert all(len(code_excerpt(standard_source(name))) > 800 for name in CODE_MODULES)


def test_a_module_without_source_is_a_named_error() -> None:
    with pytest.raises(DemoModelError, match=r"has none for 'sys' .*use a Python installation with Lib"):
        standard_source("sys")
