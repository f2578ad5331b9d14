"""The routes for the served model and its load, and the paths that clients of vLLM, SGLang and SageMaker request."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler.policy.request import FinishReason
from server.api.served import ServedModel
from server.api.sglang.service_routes import service_routes
from server.http.app import build_app
from server.http.guards import ApiKeys
from server.options.pools import single_pool
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.requests.asgi import ask
from tests.support.service.front_process import FrontProcess


def test_models_are_shown_by_every_name(front: FrontProcess, client: openai.OpenAI) -> None:
    cards = [card.model_dump() for card in client.models.list().data]
    assert [card["id"] for card in cards] == ["tiny", "claude-alias"]
    card = front.get("/v1/models/claude-alias").json()
    assert (card["id"], card["root"], card["max_model_len"]) == ("claude-alias", "tiny", MAX_LEN)
    assert card["permission"][0]["object"] == "model_permission" and card["parent"] is None
    assert front.get("/v1/models/unknown").status_code == 404


def test_the_load_is_the_requests_that_are_being_answered(front: FrontProcess) -> None:
    def load() -> int:
        return int(front.get("/load").json()["server_load"])

    assert load() == 0
    more = threading.Event()
    front.script("t-load", "abc", gates={1: more})
    body = {"model": "tiny", "prompt": "t-load", "n": 3}
    waiting = threading.Thread(target=lambda: front.post("/v1/completions", json=body))
    waiting.start()
    front.served("t-load")
    assert load() == 1, "a request with three choices counts once"
    more.set()
    waiting.join()
    assert load() == 0


def test_the_tokenizer_is_described(front: FrontProcess) -> None:
    told = front.get("/tokenizer_info").json()
    assert told["tokenizer_class"] and told["eos_token"] == "<|end|>"
    assert "<|start|>" in told["chat_template"]
    assert told["model_max_length"] >= front.post("/tokenize", json={"prompt": "x"}).json()["max_model_len"]
    marks = {each["content"]: each["special"] for each in told["added_tokens_decoder"].values()}
    assert marks["<|start|>"] is True and told["added_tokens_decoder"]["1"]["content"] == "<|end|>"


def test_sglang_s_clients_find_the_model_and_the_server(front: FrontProcess) -> None:
    model = front.get("/get_model_info").json()
    assert model == front.get("/model_info").json()
    assert model["is_generation"] is True and model["model_path"] == model["tokenizer_path"] != ""
    assert model["preferred_sampling_params"] == {"top_k": 7}, "generation_config.json's"
    server = front.get("/get_server_info").json()
    assert server == front.get("/server_info").json()
    assert (server["served_model_name"], server["context_length"]) == ("tiny", MAX_LEN)
    assert server["dp_size"] == server["ep_size"] == 2 and server["version"]


@pytest.mark.parametrize("target_itl_ms", [None, 40.0])
def test_the_target_between_tokens_is_told(target_itl_ms: float | None) -> None:
    nothing: Any = None
    model = ServedModel(
        names=("m",),
        tokenizer=nothing,
        sampling_defaults={},
        max_len=lambda: 9,
        created=0,
        structures=nothing,
    )
    routes = service_routes(
        model, nothing, version="0", pools=lambda: single_pool(1), target_itl_ms=target_itl_ms
    )
    told = ask(build_app([routes], version="0", keys=ApiKeys()), "GET", "/server_info").json()
    assert told["target_itl_ms"] == target_itl_ms


def test_sglang_s_clients_find_the_server_s_capacity(front: FrontProcess) -> None:
    server = front.get("/server_info").json()
    ranks = server["internal_states"]
    assert [rank["dp_rank"] for rank in ranks] == [0, 1]
    assert server["max_total_num_tokens"] == sum(rank["max_total_num_tokens"] for rank in ranks) > 0
    assert server["max_running_requests"] == sum(rank["max_running_requests"] for rank in ranks) > 0
    assert server["page_size"] > 0 and server["chunked_prefill_size"] > 0 and server["device"] == "cpu"


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache",
        "/flush_cache",
        *(f"/reset_prefix_cache?reset_external={value}" for value in ("false", "true")),
    ],
)
def test_every_rank_is_told_to_forget_its_prefixes_in_the_order_of_requests(
    front: FrontProcess, path: str
) -> None:
    before = [len(rank.forgotten) for rank in front.ranks]
    told = [len(rank.requests) for rank in front.ranks]
    answer = front.post(path)
    assert answer.status_code == 200, answer.text
    for rank, num_before in zip(front.ranks, before, strict=True):
        rank.wait_for(lambda each, least=num_before: len(each.forgotten) == least + 1)
    assert [rank.forgotten[-1] for rank in front.ranks] == told


def test_a_flush_hides_records_of_a_node_whose_clock_was_ahead(model: Path) -> None:
    with contextlib.closing(FrontProcess(model, num_ranks=1)) as front:
        ahead = time.time_ns() + 10**15
        rank = front.attach(0, kv_generation=ahead)
        assert front.post("/flush_cache").status_code == 200
        rank.wait_for(lambda each: bool(each.forgotten))
        assert rank.generations == [ahead + 1]


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/reset_prefix_cache?reset_external=perhaps", 400, "reset_external"),
        ("GET", "/flush_cache", 405, "Use POST for /flush_cache"),
        ("GET", "/reset_prefix_cache", 405, ""),
    ],
)
def test_what_cannot_be_forgotten_is_refused_by_name(
    front: FrontProcess, method: str, path: str, status: int, said: str
) -> None:
    answer = front.get(path) if method == "GET" else front.post(path)
    assert answer.status_code == status and said in answer.json()["error"]["message"]


def test_health_is_a_token_that_was_made(front: FrontProcess) -> None:
    mark = front.decode([0])
    more = threading.Event()
    front.script(mark, [5], gates={0: more})
    before = sum(len(rank.requests) for rank in front.ranks)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(front.get, "/health_generate") for _ in range(4)]
        front.served(mark)
        more.set()
        assert [each.result().status_code for each in asked] == [200] * 4
    assert 1 <= sum(len(rank.requests) for rank in front.ranks) - before <= 4
    front.script(mark, "", finish=FinishReason.ERROR, error="out of luck")
    assert front.get("/health_generate").status_code == 500
    for rank in front.ranks:
        rank.scripts.pop(mark)
