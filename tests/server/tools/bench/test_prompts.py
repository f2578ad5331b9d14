"""Prompts: passages that share only the prefixes of a trace, and whole prompts from files."""

import json
from pathlib import Path

import httpx
import pytest

from server.http.client import ServiceClient, ServiceError
from server.options.flag import OptionsError
from server.tools.bench.prompts import (
    CheckpointTokenizer,
    Passages,
    Prompts,
    RequestLengths,
    ServiceTokenizer,
    passages_of,
    read_prompts,
)
from tests.support.models.tiny_tokenizer import write_tokenizer


class Words:
    """A tokenizer with words as tokens and a chat template of three tokens."""

    num_chat_tokens = 3

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.words += text.split()
        return list(range(len(self.words) - len(text.split()), len(self.words)))

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(self.words[each] for each in token_ids)


def test_passages_have_their_length_and_begin_where_no_other_does() -> None:
    passages = passages_of(None, Words(), seed=0)
    taken = [passages.take(128) for _ in range(5000)]
    assert {len(each) for each in taken} == {128}
    assert len({each[0] for each in taken}) == 5000


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 10])
def test_every_token_is_a_beginning_once_before_one_is_again(num_tokens: int) -> None:
    passages = Passages(range(num_tokens))
    assert sorted(passages.take(1)[0] for _ in range(num_tokens)) == list(range(num_tokens))


def test_a_passage_at_the_end_goes_on_at_the_beginning() -> None:
    assert Passages([1, 2, 3]).take(7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_seed_chooses_the_passages() -> None:
    ids = range(1000)
    assert Passages(ids, seed=1).take(3) == Passages(ids, seed=1).take(3) != Passages(ids, seed=2).take(3)


def test_the_same_hash_ids_are_the_same_tokens_within_a_level() -> None:
    prompts = Prompts(Passages(range(100_000)), Words(), is_chat=False)
    first = prompts.take(RequestLengths(8, 1200, (7, 8, 9), 512))
    second = prompts.take(RequestLengths(8, 1100, (7, 8, 10), 512))
    assert len(first) == 1200 and len(second) == 1100
    assert first[:1024] == second[:1024] and first[1024] != second[1024]
    prompts.begin_level()
    assert prompts.take(RequestLengths(8, 1200, (7, 8, 9), 512))[0] != first[0]


@pytest.mark.parametrize("scale", [0.0325, 0.05, 0.02, 0.1, 0.001])
def test_scaled_prompts_have_their_length_and_part_where_their_hash_ids_part(scale: float) -> None:
    prompts = Prompts(Passages(range(1_000_000)), Words(), is_chat=False)
    num_tokens, blocks = max(1, round(60 * 512 * scale)), tuple(range(60))
    first, second = (
        prompts.take(RequestLengths(8, num_tokens, (*blocks[:30], *ids), 512 * scale))
        for ids in (range(100, 130), range(200, 230))
    )
    assert len(first) == len(second) == num_tokens
    shared = round(30 * 512 * scale)
    assert first[:shared] == second[:shared] and first[shared:] != second[shared:]


def test_a_chat_s_text_leaves_room_for_the_template() -> None:
    words = Words()
    prompts = Prompts(passages_of(None, words, seed=0), words, is_chat=True)
    assert len(str(prompts.take(RequestLengths(8, 20))).split()) == 17
    assert len(str(prompts.take(RequestLengths(8, 2))).split()) == 1, "at least one token"


LINES = [
    ("mt_bench", {"question_id": 1, "turns": ["first", "second"]}, "first"),
    ("human_eval", {"task_id": "t", "prompt": "def f():"}, "def f():"),
    ("a string", "hello", "hello"),
    ("chat", {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]}, "hi"),
    ("ShareGPT", {"id": "x", "conversations": [{"from": "human", "value": "hey"}]}, "hey"),
]


@pytest.mark.parametrize(("line", "prompt"), [each[1:] for each in LINES], ids=[each[0] for each in LINES])
def test_lines_of_published_sets_are_read(tmp_path: Path, line: object, prompt: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(line) + "\n\n")
    prompts = Prompts(read_prompts(path))
    assert [prompts.take(RequestLengths(1)), prompts.take(RequestLengths(1))] == [prompt, prompt], (
        "the prompts are repeated"
    )


def test_paragraphs_of_a_text_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("one\nmore\r\n\r\ntwo\n\n\n")
    assert read_prompts(path) == ["one\nmore", "two"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.jsonl", '"a"\n{oh\n', "p.jsonl, line 2: not JSON"),
        (
            "p.jsonl",
            '{"answer": "a"}\n',
            "p.jsonl, line 1: no text; give a string or an object with one of",
        ),
        ("p.jsonl", "\n", "p.jsonl has no prompts"),
        ("p.jsonl", "1" * 5000, "p.jsonl, line 1: not JSON"),
        ("p.json", '["a", 3]', "p.json, element 2: no text"),
        ("p.txt", " \n", "p.txt has no prompts"),
    ],
)
def test_a_file_that_is_no_good_is_named_with_the_line(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(OptionsError, match=words):
        read_prompts(tmp_path / name)


@pytest.mark.parametrize(
    "text", ['[{"prompt": "a"}, "b"]', '[\n {"prompt": "a"},\n "b"\n]', '{"prompt": "a"}\n"b"\n']
)
def test_a_json_file_is_a_list_or_lines(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    assert read_prompts(tmp_path / "p.json") == ["a", "b"]


def test_a_line_may_hold_what_unicode_calls_a_line_s_end(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('"a\u2028b"\n', encoding="utf-8")
    assert read_prompts(tmp_path / "p.jsonl") == ["a\u2028b"]


def test_a_service_that_counts_no_tokens_is_a_sentence_that_says_what_to_do() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"tokens": []}))  # llama.cpp's
    service = ServiceClient("http://x", http=httpx.Client(transport=transport))
    with pytest.raises(
        ServiceError, match=r"/tokenize is not compatible with vLLM's; .*--tokenizer DIRECTORY"
    ):
        passages_of(None, ServiceTokenizer(service, "m"), seed=3)


def test_a_service_without_tokenize_is_a_sentence_that_says_what_to_do() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(404, json={"detail": "Not Found"}))
    service = ServiceClient("http://x", http=httpx.Client(transport=transport))
    with pytest.raises(
        ServiceError, match=r"cannot count tokens with /tokenize .*404.*--tokenizer DIRECTORY"
    ):
        passages_of(None, ServiceTokenizer(service, "m"), seed=0)


def test_a_checkpoint_s_tokenizer_counts_as_the_service_does(tmp_path: Path) -> None:
    tokens = CheckpointTokenizer(str(write_tokenizer(tmp_path)))
    token_ids = tokens.encode("hello there")
    assert tokens.decode(token_ids) == "hello there"
    assert tokens.num_chat_tokens > 3, "includes the template's tokens"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="--tokenizer: cannot load a tokenizer from"):
        CheckpointTokenizer(str(tmp_path))
