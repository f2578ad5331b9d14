"""/tokenize, /detokenize, /load, and the commands of docs/endpoints.md."""

import json
import re
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.front_process import FrontProcess
from tests.support.tiny_tokenizer import MAX_LEN

KEY = {"Authorization": "Bearer sesame"}
HELLO = [{"role": "user", "content": "hello"}]


def tokenize(front: FrontProcess, **body: Any) -> dict[str, Any]:
    response = front.post("/tokenize", json={"model": "tiny"} | body, headers=KEY)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == MAX_LEN
    return answer


@pytest.mark.parametrize("text", ["hello wörld 😀!", "<|start|>user", "", "the cat " * 5000])
def test_a_prompt_s_tokens_are_those_it_is_served_with(front: FrontProcess, text: str) -> None:
    answer = tokenize(front, prompt=text)
    assert answer["tokens"] == front.encode(text) and answer["token_strs"] is None
    response = front.post("/detokenize", json={"tokens": answer["tokens"]}, headers=KEY)
    assert response.json() == {"prompt": text}


def test_a_chat_s_tokens_are_the_template_s(front: FrontProcess) -> None:
    assert front.decode(tokenize(front, messages=HELLO)["tokens"]) == (
        "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    )
    bare = tokenize(front, messages=HELLO, add_generation_prompt=False)
    assert front.decode(bare["tokens"]) == "<|start|>user\nhello<|end|>\n"


def test_the_tokens_own_spelling_is_shown_when_asked_for(front: FrontProcess) -> None:
    assert tokenize(front, prompt="é!", return_token_strs=True)["token_strs"] == ["Ã", "©", "!"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x" * (1 << 20) + "x"}, "prompt"),
        ("/tokenize", {"messages": [{"role": "pirate", "content": "x"}]}, "messages"),
        (
            "/tokenize",
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, 99_999]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
def test_a_wrong_value_is_a_400_that_names_the_field(
    front: FrontProcess, path: str, body: Any, param: str
) -> None:
    content = json.dumps(body)  # escapes half a surrogate pair
    response = front.post(path, content=content, headers=KEY | {"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_unknown_models_and_missing_keys_are_refused(front: FrontProcess) -> None:
    assert front.post("/tokenize", json={"model": "x", "prompt": "x"}, headers=KEY).status_code == 404
    assert front.post("/detokenize", json={"model": "x", "tokens": []}, headers=KEY).status_code == 404
    assert front.post("/tokenize", json={"prompt": "x"}).status_code == 401


def test_the_load_is_the_requests_that_are_being_answered(front: FrontProcess) -> None:
    def load() -> int:
        return int(front.get("/load").json()["server_load"])

    assert load() == 0
    more = threading.Event()
    front.script("t-load", "abc", gates={1: more})
    body = {"model": "tiny", "prompt": "t-load", "n": 3}
    waiting = threading.Thread(target=lambda: front.post("/v1/completions", json=body, headers=KEY))
    waiting.start()
    front.served("t-load")
    assert load() == 1, "a request with three choices is one"
    more.set()
    waiting.join()
    assert load() == 0


def test_one_model_is_shown_by_its_name(front: FrontProcess) -> None:
    card = front.get("/v1/models/claude-alias", headers=KEY).json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("claude-alias", "tiny", MAX_LEN)
    assert front.get("/v1/models/unknown", headers=KEY).status_code == 404


def commands() -> list[list[str]]:
    """The words of every curl command in the document; scripted ranks have no experts to tell of."""
    text = (Path(__file__).parents[4] / "docs" / "endpoints.md").read_text(encoding="utf-8")
    found = re.findall(r"^curl (?:.*\\\n)*.*$", text, flags=re.MULTILINE)
    split = [shlex.split(command.replace("\\\n", " "))[1:] for command in found]
    assert len(split) > 10, "the document has commands"
    return [words for words in split if not any("/experts" in word for word in words)]


@pytest.mark.parametrize(
    "words", commands(), ids=lambda words: next(word for word in words if "http" in word)
)
def test_the_documented_commands_work(front: FrontProcess, words: list[str]) -> None:
    url = next(word for word in words if word.startswith("http"))
    path = re.sub(r"^http://[^/]+", "", url)
    sent = words[words.index("-d") + 1].replace('"demo"', '"tiny"') if "-d" in words else None
    headers = {"Authorization": "Bearer sesame", "content-type": "application/json"}
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if sent else "GET"
    response = (front.post if method == "POST" else front.get)(
        path.replace("demo", "tiny"), headers=headers, **({"content": sent} if sent else {})
    )
    assert response.status_code == 200, response.text
