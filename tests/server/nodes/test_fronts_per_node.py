"""Every node of a service serves HTTP (`--fronts per-node`): real torchrun agents, engines and fronts in namespaces."""

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.nodes.test_nodes import (
    ENDPOINT_NODE,
    HTTP_PORT,
    NUM_STREAMS,
    OTHER_NODE,
    end_node,
    engine_of,
    joining,
    stream_all,
    torchruns,
    worker,
)
from tests.support.service.namespaces import ask, set_link, threads_inside
from tests.support.service.real_service import START_S, RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

URLS = [f"http://10.213.7.{node + 1}:{HTTP_PORT}" for node in (OTHER_NODE, ENDPOINT_NODE)]
HERE, THERE = URLS[ENDPOINT_NODE], URLS[OTHER_NODE]


def start(namespaces: list[str], directory: Path, *flags: str) -> RealService:
    """Start a torchrun on each node, with the same line."""
    model = write_tiny_model(directory / "tiny")
    flags = ("--host=0.0.0.0", "--fronts=per-node", *flags)
    nodes = [node._replace(worker=worker(model, *flags)) for node in torchruns(namespaces, model)]
    return RealService(HTTP_PORT, nodes, directory / "output.txt")


def wait_until_healthy(service: RealService, namespaces: list[str]) -> None:
    for name, url in zip(namespaces, URLS, strict=True):
        wait_until(
            lambda: ask(name, "GET", f"{url}/health") is not None,  # noqa: B023
            service.output,
            within_s=START_S,
        )


def post(namespace: str, url: str, key: str) -> httpx.Response:
    """Send a completion with a key for retries."""
    body = {"model": "tiny", "prompt": "a b", "max_tokens": 8, "temperature": 1.0}
    with threads_inside(namespace) as thread:
        sent = thread.submit(
            httpx.post, f"{url}/v1/completions", json=body, headers={"Idempotency-Key": key}, timeout=60
        )
        return sent.result()


def respond(namespace: str, url: str, *, background: bool) -> dict[str, Any]:
    """Create a response of 200 drawn tokens."""
    body = {
        "model": "tiny",
        "input": "a b",
        "max_output_tokens": 200,
        "ignore_eos": True,
        "seed": 1,
        "background": background,
    }
    with threads_inside(namespace) as thread:
        response = thread.submit(httpx.post, f"{url}/v1/responses", json=body, timeout=60).result()
    assert response.status_code == 200, response.text
    return dict(response.json())


def response_at(namespace: str, url: str, response_id: str) -> dict[str, Any]:
    said = ask(namespace, "GET", f"{url}/v1/responses/{response_id}")
    return json.loads(said) if said else {"status": "unknown"}


def num_tokens(namespace: str, url: str) -> float:
    """Return the number of tokens that the service has generated, as one of its fronts reports it."""
    said = ask(namespace, "GET", f"{url}/metrics") or ""
    return sum(
        float(line.split()[-1])
        for line in said.splitlines()
        if line.startswith("vllm:generation_tokens_total{")
    )


def kinds_of_events(namespace: str, url: str) -> list[str]:
    said = ask(namespace, "GET", f"{url}/v1/fault_tolerance/status")
    return [event["kind"] for event in json.loads(said)["events"]] if said else []


@pytest.mark.slow
def test_each_node_answers_and_one_survives_the_loss_of_another(
    namespaces: list[str], tmp_path: Path
) -> None:
    key = tmp_path / "cluster.key"
    key.write_text("k" * 64)
    key.chmod(0o600)
    with start(namespaces, tmp_path, f"--cluster-key-file={key}") as service:
        wait_until_healthy(service, namespaces)
        here, there = namespaces[ENDPOINT_NODE], namespaces[OTHER_NODE]
        assert service.output().count("serving on 2 ranks at http://") == 2
        expected = stream_all(here, url=HERE)
        assert stream_all(there, url=THERE) == expected
        assert num_tokens(there, THERE) == num_tokens(here, HERE) == 2 * NUM_STREAMS * 200
        answers = {key: post(here, HERE, key) for key in "abcdef"}
        for each, answer in answers.items():
            again = post(there, THERE, each)
            assert again.text == answer.text and again.headers["Idempotent-Replayed"] == "true"

        subprocess.run(["kill", "-9", str(engine_of(service, there))], check=True)
        assert stream_all(there, url=THERE) == expected, "the front's own engine was lost"
        wait_until_healthy(service, namespaces)

        begun: dict[str, Any] = {}

        def begin_and_end_node() -> None:
            begun.update(respond(there, THERE, background=True))
            end_node(service, OTHER_NODE)

        assert stream_all(here, url=HERE, then=begin_and_end_node) == expected
        assert begun["status"] in ("queued", "in_progress")
        wait_until(lambda: "fronts_lost" in kinds_of_events(here, HERE), service.output)
        for each in answers:
            assert post(here, HERE, each).status_code == 200, "this front answers in place of the lost one"
        output = respond(here, HERE, background=False)["output"][-1]["content"]
        wait_until(lambda: response_at(here, HERE, begun["id"])["status"] == "incomplete", service.output)
        assert response_at(here, HERE, begun["id"])["output"][-1]["content"] == output

        flags = ("--host=0.0.0.0", "--fronts=per-node", f"--cluster-key-file={key}")
        with joining(there, tmp_path / "tiny", tmp_path / "joined.txt", *flags) as node:
            wait_until(lambda: "fronts_back" in kinds_of_events(here, HERE), node.output, within_s=START_S)
            wait_until_healthy(service, namespaces)
            node.wait_until(lambda: "serving on 2 ranks at http://" in node.output())
            assert stream_all(there, url=THERE) == stream_all(here, url=HERE) == expected
            assert response_at(there, THERE, begun["id"])["output"][-1]["content"] == output
            first, again = (post(name, url, "new") for name, url in ((here, HERE), (there, THERE)))
            assert again.text == first.text and again.headers["Idempotent-Replayed"] == "true"


@pytest.mark.slow
def test_a_node_that_is_cut_off_ends_its_requests_and_the_other_answers_in_its_place(
    namespaces: list[str], tmp_path: Path
) -> None:
    with start(namespaces, tmp_path) as service:
        wait_until_healthy(service, namespaces)
        here, there = namespaces[ENDPOINT_NODE], namespaces[OTHER_NODE]
        expected = stream_all(here, url=HERE)
        keys = "abcdefgh"
        before = [post(there, THERE, key).text for key in keys]
        assert [post(here, HERE, key).text for key in keys] == before
        inside = f"http://127.0.0.1:{HTTP_PORT}"
        with pytest.raises(AssertionError, match="node of the leading front does not answer"):
            stream_all(there, url=inside, then=lambda: set_link(there, "down"))
        wait_until(lambda: "fronts_lost" in kinds_of_events(here, HERE), service.output)
        after = [post(here, HERE, key) for key in keys]
        assert {each.status_code for each in after} == {200}
        assert stream_all(here, url=HERE) == expected
