"""The written checkpoint, as loaded by plain transformers."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from moe.demo_model.build import layer_mlp
from moe.demo_model.cache import SAMPLING
from moe.demo_model.checkpoint import build_tokenizer, write_checkpoint, write_tokenizer
from moe.demo_model.conversion import MoeMlp, Recipe, convert_mlp
from moe.demo_model.gguf_weights import GgufVocabulary
from tests.moe.demo_model import tiny

IDS = torch.arange(40)[None] + 3


def write(out: Path, recipe: Recipe) -> list[MoeMlp]:
    weights = tiny.weights()
    x, is_code = tiny.calibration_inputs()
    layers = [convert_mlp(layer_mlp(weights, layer), x, is_code, recipe) for layer in range(1, tiny.LAYERS)]
    write_checkpoint(out, tiny.config(), weights, layers, recipe)
    return layers


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(IDS).logits
    return logits


def test_with_all_experts_chosen_the_moe_answers_as_the_dense_model(tmp_path: Path) -> None:
    """Up to the few per cent of the scales: attention, rotary embedding, norms and tied embedding are all right."""
    write(tmp_path, tiny.EVERYTHING)
    dense = LlamaForCausalLM.from_pretrained(None, config=tiny.config(), state_dict=tiny.weights()).eval()
    moe = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    expected = logits_of(dense)
    difference = (logits_of(moe) - expected).norm() / expected.norm()
    assert difference < 0.05
    for layer in moe.model.layers:  # the control: another rotation must change the answer
        layer.self_attn.q_proj.weight.data = layer.self_attn.q_proj.weight.data.roll(1, dims=0)
    assert (logits_of(moe) - expected).norm() / expected.norm() > 0.3


def test_transformers_misses_nothing_and_ignores_nothing(tmp_path: Path) -> None:
    write(tmp_path, tiny.RECIPE)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_two_writes_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, tiny.RECIPE)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_stop_token_and_origin_are_stated(tmp_path: Path) -> None:
    write(tmp_path, tiny.RECIPE)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **SAMPLING}
    readme = (tmp_path / "README.md").read_text()
    assert "converted, not trained" in readme and "SmolLM2-135M-Instruct" in readme and "Apache-2.0" in readme


def test_a_shared_expert_that_the_class_cannot_state_is_our_bug(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="multiples of a routed one"):
        write(tmp_path, Recipe(num_experts=4, experts_per_token=2, shared_neurons=13, expert_neurons=4))


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> GgufVocabulary:
    """Return a vocabulary of all bytes and three merges, one of which would join two digits."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "ab", "\u0120\u0120"]
    return GgufVocabulary(
        tokens=tokens,
        merges=["1 2", "a b", "\u0120 \u0120"],
        control_ids=[0, 1, 2],
        bos_id=1,
        eos_id=2,
        pad_id=2,
        unk_id=0,
        chat_template=TEMPLATE,
    )


def test_merges_are_used_but_digits_stay_single() -> None:
    assert build_tokenizer(vocabulary()).encode("ab12").tokens == ["ab", "1", "2"]


def test_spaces_before_a_digit_are_split_from_it() -> None:
    assert build_tokenizer(vocabulary()).encode("a  1").tokens == ["a", "\u0120\u0120", "1"]


def test_any_text_comes_back() -> None:
    tokenizer = build_tokenizer(vocabulary())
    text = " don't\n\tx = 3.14  é 漢字 😀 "
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_special_tokens_are_whole_and_are_not_added_by_themselves() -> None:
    assert build_tokenizer(vocabulary()).encode("<|im_start|>ab<|im_end|>").ids == [1, 260, 2]


def test_transformers_reads_it_with_ids_and_chat_template(tmp_path: Path) -> None:
    write_tokenizer(vocabulary(), 128, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 128
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "ab12"}], tokenize=False)
    assert rendered == "<|im_start|>ab12<|im_end|>"
    assert tokenizer(rendered).input_ids == build_tokenizer(vocabulary()).encode(rendered).ids
    assert tokenizer.decode([1, 260, 2], skip_special_tokens=True) == "ab"
