"""Kimi's tokenizer returns tiktoken's ids, and no code of a checkpoint runs."""

import base64
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.front.published import kimi_tokenizer
from server.front.published.kimi_tokenizer import KIMI_SPLIT, byte_pair_tokenizer, parts_of
from server.front.tokenizer import Tokenizer, TokenizerError
from tests.support.models.tiktoken_files import PUBLISHED_SPLIT, made_up_ranks, oracle, write_tiktoken
from tests.support.models.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[4]
RANKS = made_up_ranks()
BASE = len(RANKS)
CHAT_TEMPLATE = (  # a shortened template of Kimi-K2
    "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
# Ids that tiktoken 0.14.0 returns with the made-up ranks and the published split.
RECORDED: dict[str, list[int]] = {
    "中文abc": [262, 368],
    "中文English混合": [262, 69, 357, 296],
    "I'll WE'VE don'T it's 'S": [73, 39, 360, 32, 375, 32, 100, 111, 110, 39, 84, 32, 361, 32, 39, 83],
    "12345678 9": [49, 50, 51, 52, 53, 54, 55, 56, 32, 57],
    "two  spaces\n\n\ttab    \r\n x": [116, 338, 32, 265, 353, 10, 10, 9, 341, 266, 266, 13, 10, 32, 120],
    "aaaaa'ab'ss\n1": [264, 97, 39, 257, 39, 115, 115, 10, 49],
    "日本語のテキスト 한국어 мир": [302, 321, 32, 287, 276, 332],
    "😀😀 // x=y+z;": [278, 32, 47, 47, 32, 120, 61, 121, 43, 122, 59],
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(str(write_tiktoken(tmp_path_factory.mktemp("kimi"), chat_template=CHAT_TEMPLATE)))


def test_the_split_is_the_published_one() -> None:
    assert "|".join(PUBLISHED_SPLIT) == KIMI_SPLIT


@pytest.mark.parametrize("text", RECORDED)
def test_ids_are_those_that_tiktoken_gave(tokenizer: Tokenizer, text: str) -> None:
    assert oracle(RANKS)(text) == RECORDED[text], "the oracle is tiktoken's algorithm"
    assert tokenizer.encode(text, add_special_tokens=True) == RECORDED[text]
    assert tokenizer.decode(RECORDED[text], skip_special_tokens=False) == text


def test_any_text_has_tiktoken_s_ids(tokenizer: Tokenizer) -> None:
    letters = [
        *"aabbAB'''stlveSTLVdm12349.,-_! \n\r\t  中文字〇々⺀あアé한\uff21ǅªʰß\u017f\u212aж\u0301\u00a0\u3000\u0085\x1c\u200b½٣😀"
    ]
    draw, slow = random.Random(11), oracle(RANKS)
    for _ in range(600):
        text = "".join(draw.choices(letters, k=draw.randint(0, 24)))
        assert tokenizer.encode(text, add_special_tokens=False) == slow(text), repr(text)


def test_a_split_without_han_gives_other_ids() -> None:
    default = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ranks = {**RANKS, "中文abc".encode(): BASE}
    assert byte_pair_tokenizer(ranks, default).encode("中文abc").ids == [BASE], "transformers' default split"
    assert byte_pair_tokenizer(ranks, KIMI_SPLIT).encode("中文abc").ids == oracle(ranks)("中文abc") != [BASE]


def test_special_tokens_are_found_in_text_and_reserved_ones_end_with_the_vocabulary(
    tokenizer: Tokenizer,
) -> None:
    text = f"<|im_user|>a<|reserved_token_{BASE + 5}|><|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [BASE + 3, RANKS[b"a"], BASE + 5, BASE + 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == f"a<|reserved_token_{BASE + 5}|>"
    assert tokenizer.vocab_size == BASE + 256 and max(tokenizer.vocabulary().special_ids) == BASE + 255
    assert tokenizer.eos_ids == {BASE + 1}
    calls = tokenizer.encode("<|tool_calls_section_begin|>", add_special_tokens=False)
    assert tokenizer.decode(calls, skip_special_tokens=True) == "<|tool_calls_section_begin|>", "as published"
    assert tokenizer.token_bytes(RANKS["中".encode()]) == "中".encode()


def test_chats_use_the_template_of_tokenizer_config(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "中文abc"}])
    assert text == "<|im_user|>user<|im_middle|>中文abc<|im_end|><|im_assistant|>assistant<|im_middle|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    slow = oracle(RANKS)
    assert ids == [
        BASE + 3, *slow("user"), BASE + 17, *slow("中文abc"), BASE + 2, BASE + 4, *slow("assistant"), BASE + 17,
    ]  # fmt: skip


def test_long_runs_are_encoded_in_the_published_parts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kimi_tokenizer, "_MAX_RUN_CHARS", 3)
    monkeypatch.setattr(kimi_tokenizer, "_MAX_PART_CHARS", 10)
    text = "abababab  \n\n\n\n x 中文中文<|im_end|>abab"
    slow = oracle(RANKS)
    before, after = text.split("<|im_end|>")
    wanted = [*_slowly(before, slow), BASE + 2, *_slowly(after, slow)]
    assert tokenizer.encode(text, add_special_tokens=False) == wanted != slow(before)
    assert [*parts_of("aaaaaaaa    b")] == ["aaa", "aaa", "aa  ", "  b"]


def _slowly(text: str, encode: Any) -> list[int]:
    """The published `_split_whitespaces_or_nonwhitespaces` and its caller, with limits of 3 and 10."""
    ids: list[int] = []
    for begin in range(0, len(text), 10):
        part, start, length = text[begin : begin + 10], 0, 0
        for place, char in enumerate(part):
            length = length + 1 if place and part[place - 1].isspace() == char.isspace() else 1
            if length > 3:
                ids += encode(part[start:place])
                start, length = place, 1
        ids += encode(part[start:])
    return ids


KIMI_CONFIG: dict[str, Any] = {"vocab_size": BASE + 256, "max_position_embeddings": 64}


@pytest.mark.parametrize("model_type", ["kimi_k2", "kimi_k25", "kimi_linear", "deepseek_v3"])
def test_every_type_that_publishes_it_loads_it(model_type: str, tmp_path: Path) -> None:
    is_wrapper = model_type == "kimi_k25"
    config = {"model_type": model_type, **({"text_config": KIMI_CONFIG} if is_wrapper else KIMI_CONFIG)}
    made = Tokenizer(str(write_tiktoken(tmp_path, config)))
    assert made.encode("中文abc", add_special_tokens=False) == oracle(RANKS)("中文abc")
    assert made.vocab_size == BASE + 256


def _change_config(directory: Path, **changes: Any) -> None:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _lines(directory: Path, lines: list[bytes]) -> None:
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines))


SINGLE_BYTES = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
REFUSED: dict[str, tuple[Any, str]] = {
    "another class": (
        lambda directory: _change_config(
            directory, auto_map={"AutoTokenizer": ["tokenization_hy.HYTokenizer", None]}
        ),
        "tiktoken.model does not define how text is split.*tokenization_kimi.TikTokenTokenizer.*--tokenizer",
    ),
    "no class": (
        lambda directory: _change_config(directory, auto_map=None),
        "does not define how text is split",
    ),
    "another split": (
        lambda directory: write_tiktoken(directory, split=[*PUBLISHED_SPLIT[1:]]),
        "tokenization_kimi.py splits text differently from Kimi's published split",
    ),
    "a split in a form that is not read": (
        lambda directory: (directory / "tokenization_kimi.py").write_text("pat_str = make()"),
        "tokenization_kimi.py splits text differently",
    ),
    "no special tokens": (
        lambda directory: _change_config(directory, added_tokens_decoder=None),
        "has no added_tokens_decoder",
    ),
    "special tokens elsewhere": (
        lambda directory: _change_config(directory, added_tokens_decoder={"5": {"content": "<|x|>"}}),
        rf"gives names to the ids \[5\]; tiktoken.model leaves {BASE} to {BASE + 255}",
    ),
    "damaged": (
        lambda directory: _lines(directory, [b"YQ== 0", b"?? 1"]),
        "line 2 is not a token and its rank",
    ),
    "gaps": (
        lambda directory: _lines(directory, [*SINGLE_BYTES, b"YWI= 300"]),
        "ranks are not 0 to 256, each once",
    ),
    "bytes missing": (
        lambda directory: _lines(directory, [b"YQ== 0"]),
        "are not tokens, so some texts cannot be encoded",
    ),
    "a tiktoken file of another name": (
        lambda directory: (directory / "tiktoken.model").rename(directory / "hy.tiktoken"),
        "hy.tiktoken does not define how text is split.*is not run; give a folder.*--tokenizer",
    ),
    "a tiktoken file in SentencePiece's name": (
        lambda directory: (directory / "tiktoken.model").rename(directory / "tokenizer.model"),
        "tokenizer.model does not define how text is split",
    ),
    "code alone": (
        lambda directory: (directory / "tiktoken.model").unlink(),
        "its class TikTokenTokenizer is defined by the checkpoint's code, which is not run; give a folder",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_that_cannot_be_built_exactly_is_refused(case: str, tmp_path: Path) -> None:
    change, why = REFUSED[case]
    change(write_tiktoken(tmp_path))
    with pytest.raises(TokenizerError, match=f"(?s)cannot load a tokenizer from .*{why}"):
        Tokenizer(str(tmp_path))


def test_without_the_python_file_the_class_s_name_is_enough(tmp_path: Path) -> None:
    (write_tiktoken(tmp_path) / "tokenization_kimi.py").unlink()
    assert Tokenizer(str(tmp_path)).encode("中文abc", add_special_tokens=False) == oracle(RANKS)("中文abc")


def test_a_whole_tokenizer_beside_code_is_read_without_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    wanted = Tokenizer(str(tmp_path)).encode("hello", add_special_tokens=False)
    _change_config(tmp_path, auto_map={"AutoTokenizer": [None, "tokenization_x.X"]}, tokenizer_class="X")
    (tmp_path / "tokenization_x.py").write_text("raise AssertionError('code of a checkpoint was run')")
    assert Tokenizer(str(tmp_path)).encode("hello", add_special_tokens=False) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("has_whole", [True, False])
def test_no_terminal_is_asked_whether_to_run_code(has_whole: bool, tmp_path: Path) -> None:
    """Unless trust_remote_code is False, transformers prompts on a terminal and runs the code after `y`."""
    if has_whole:
        write_tokenizer(tmp_path)
        _change_config(tmp_path, auto_map={"AutoTokenizer": ["tokenization_x.X", None]}, tokenizer_class="X")
    else:
        write_tiktoken(tmp_path)
        (tmp_path / "tiktoken.model").unlink()
    code = (
        "import os, pty, sys\n"
        "def child():\n"
        "    from server.front.tokenizer import Tokenizer, TokenizerError\n"
        "    try:\n"
        "        Tokenizer(sys.argv[1]); print('loaded')\n"
        "    except TokenizerError:\n"
        "        print('refused')\n"
        "pid, terminal = pty.fork()\n"
        "if pid == 0:\n"
        "    child(); sys.stdout.flush(); os._exit(0)\n"
        "os.write(terminal, b'y\\n' * 3)\n"
        "shown = b''\n"
        "try:\n"
        "    while piece := os.read(terminal, 65536): shown += piece\n"
        "except OSError: pass\n"
        "os.waitpid(pid, 0); sys.stdout.write(shown.decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert ("loaded" if has_whole else "refused") in done.stdout
    assert "[y/N]" not in done.stdout and "was run" not in done.stdout
