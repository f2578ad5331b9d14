"""/tokenize and /detokenize, token counts of prompts, and the commands of docs/endpoints.md and docs/other_apis.md."""

import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.service.front_process import FrontProcess

HELLO = [{"role": "user", "content": "hello"}]


def tokenize(front: FrontProcess, **body: Any) -> dict[str, Any]:
    response = front.post("/tokenize", json={"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == MAX_LEN
    return answer


@pytest.mark.parametrize("text", ["hello wörld 😀!", "<|start|>user", "", "the cat " * 5000])
def test_a_prompt_s_tokens_are_those_it_is_served_with(front: FrontProcess, text: str) -> None:
    answer = tokenize(front, prompt=text)
    assert answer["tokens"] == front.encode(text) and answer["token_strs"] is None
    response = front.post("/detokenize", json={"tokens": answer["tokens"]})
    assert response.json() == {"prompt": text}


def test_a_chat_s_tokens_are_the_template_s(front: FrontProcess) -> None:
    assert front.decode(tokenize(front, messages=HELLO)["tokens"]) == (
        "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    )
    bare = tokenize(front, messages=HELLO, add_generation_prompt=False)
    assert front.decode(bare["tokens"]) == "<|start|>user\nhello<|end|>\n"


def test_the_tokens_own_spelling_is_shown_when_asked_for(front: FrontProcess) -> None:
    assert tokenize(front, prompt="é!", return_token_strs=True)["token_strs"] == ["Ã", "©", "!"]


DOCS = Path(__file__).parents[3] / "docs"
TEXT = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("endpoints.md", "other_apis.md"))
HEADERS = {"Authorization": "Bearer sesame"}


def commands() -> list[list[str]]:
    """Return the words of every curl command in the documents, except those about experts: scripted ranks have none."""
    found = re.findall(r"^curl (?:.*\\\n)*.*$", TEXT, flags=re.MULTILINE)
    split = [shlex.split(command.replace("\\\n", " "))[1:] for command in found]
    assert len(split) > 10, "the documents have commands"
    return [words for words in split if not any("/experts" in word for word in words)]


def upload(front: FrontProcess) -> httpx.Response:
    requests = re.search(r"`requests.jsonl`:\n\n```json\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert requests is not None
    form = {"data": {"purpose": "batch"}, "files": {"file": requests[1].replace("demo", "tiny").encode()}}
    return front.post("/v1/files", headers=HEADERS, **form)


def with_ids(front: FrontProcess, text: str) -> str:
    """Insert the ids of a new file or batch where the documents omit them."""
    if "file-..." in text:
        text = text.replace("file-...", upload(front).json()["id"])
    if "batch_..." in text:
        body = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        body["input_file_id"] = upload(front).json()["id"]
        text = text.replace("batch_...", front.post("/v1/batches", headers=HEADERS, json=body).json()["id"])
    return text


@pytest.mark.parametrize(
    "words", commands(), ids=lambda words: next(word for word in words if "http" in word)
)
def test_the_documented_commands_work(front: FrontProcess, words: list[str]) -> None:
    url = next(word for word in words if word.startswith("http"))
    path = with_ids(front, re.sub(r"^http://[^/]+", "", url).replace("demo", "tiny"))
    sent = words[words.index("-d") + 1].replace('"demo"', '"tiny"') if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "POST" if sent else "GET"
    if "-F" in words:
        response = upload(front)
    else:
        how = {"content": with_ids(front, sent)} if sent else {}
        headers = HEADERS | {"content-type": "application/json"}
        response = (front.post if method == "POST" else front.get)(path, headers=headers, **how)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_is_tokenized_as_its_template_says(
    front: FrontProcess, special: bool, begins: bool, continues: bool
) -> None:
    talk = [{"role": "user", "content": "Hi there!"}, {"role": "assistant", "content": "Sure,"}]
    wish = {
        "add_special_tokens": special,
        "add_generation_prompt": begins,
        "continue_final_message": continues,
    }
    response = front.post("/tokenize", json={"model": "tiny", "messages": talk, **wish})
    if begins and continues:
        assert response.status_code == 400
        return
    answer = response.json()
    text = "<|start|>user\nHi there!<|end|>\n<|start|>assistant\nSure," + ("" if continues else "<|end|>\n")
    assert front.decode(answer["tokens"]) == text + "<|start|>assistant\n" * begins
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), MAX_LEN)
    assert answer["token_strs"] is None


SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("count_path", "path", "field", "fields"),
    [
        ("/tokenize", "/v1/chat/completions", "count", {"messages": [*SYSTEM, "WORD"]}),
        ("/v1/responses/input_tokens", "/v1/responses", "input_tokens", {"instructions": "be brief"}),
        (
            "/v1/messages/count_tokens",
            "/v1/messages",
            "input_tokens",
            {"system": "be brief", "messages": ["WORD"]},
        ),
    ],
)
def test_a_prompt_s_tokens_can_be_counted_beforehand(
    front: FrontProcess, count_path: str, path: str, field: str, fields: dict[str, Any]
) -> None:
    word = f"count-{path.rpartition('/')[2]}"
    own = {"role": "user", "content": word}
    messages = [own if each == "WORD" else each for each in fields.get("messages", ())]
    body = {"model": "tiny", **fields} | ({"messages": messages} if messages else {"input": word})
    counted = front.post(count_path, json=body).json()[field]
    assert front.post(path, json=body | {"max_tokens": 1}).status_code == 200
    assert counted == len(front.asked(word).prompt_ids)
