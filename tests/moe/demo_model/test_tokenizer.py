"""The tokenizer: byte-level, digits by themselves, special tokens whole, readable by plain transformers."""

from pathlib import Path

from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from moe.demo_model.gguf_weights import Vocabulary
from moe.demo_model.tokenizer import build_tokenizer, write_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def vocabulary() -> Vocabulary:
    """All bytes, and three merges; one of them would join two digits."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet()), "12", "ab", "\u0120\u0120"]
    return Vocabulary(
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
