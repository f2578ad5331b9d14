"""Scoring of texts as in lm_eval's local-completions: the client's arithmetic against transformers.

The HTTP application and the engine are real and in this process. Only the link between them is replaced.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch

from scheduler.policy.request import Request
from server.api.openai.completions import completion_routes
from server.api.served import ServedModel
from server.front.journal import Journal
from server.front.requests import Requests
from server.front.routing.moves import Moves
from server.front.routing.router import Router
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.app import build_app
from server.http.guards import ApiKeys
from server.http.observability.metrics import Metrics
from tests.support.engines.serving import build, serve
from tests.support.models.families import write_checkpoint
from tests.support.requests.asgi import ask

TOLERANCE = 1e-4
CASES = ((5, 4), (1, 3), (17, 1), (30, 12))  # tokens of context and of continuation


class Scored(NamedTuple):
    """lm_eval's result for one choice."""

    loglikelihood: float
    is_greedy: bool


class EngineRanks:
    """The part of `Ranks` that `Requests` needs. All requests of one HTTP request run in one engine before they are delivered."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: list[Request] = []
        self.requests: Requests | None = None

    def post(self, rank: int, message: object) -> None:
        raise AssertionError("no request is aborted here")

    def submit(self, rank: int, request: Request, *, now_s: float) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._run)
        self._waiting.append(request)

    def _run(self) -> None:
        built = build(self._directory, max_model_len=128, max_num_batched_tokens=24, max_num_seqs=8)
        assert self.requests is not None
        self.requests.deliver(0, serve(built, self._waiting).outputs)


@pytest.fixture(scope="module")
def oracle(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint with the tiny tokenizer's vocabulary, and transformers' model of it."""
    directory = tmp_path_factory.mktemp("scored")
    vocabulary = tokenizers.Tokenizer.from_file(str(model_dir / "tokenizer.json")).get_vocab_size()
    return directory, write_checkpoint("qwen3_moe", directory, vocab_size=vocabulary)


def answer(directory: Path, model_dir: Path, body: dict[str, Any]) -> dict[str, Any]:
    tokenizer, ranks, metrics = Tokenizer(str(model_dir)), EngineRanks(directory), Metrics("tiny", 1)
    router, journal = Router(1), Journal()
    requests = Requests(
        decoder=tokenizer,
        ranks=ranks,  # type: ignore[arg-type]
        router=router,
        journal=journal,
        moves=Moves(router, ranks, journal),
        metrics=metrics,
        timeout_s=0.0,
    )
    ranks.requests = requests
    model = ServedModel(
        names=("tiny",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: 128,
        created=0,
        structures=StructureChecks(tokenizer.vocabulary),
    )
    app = build_app([completion_routes(model, requests)], version="0", keys=ApiKeys())

    response = ask(app, "POST", "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def as_lm_eval_scores(choices: list[dict[str, Any]], context_lengths: list[int]) -> list[Scored]:
    """Score choices as lm_eval 0.4's local-completions does. They echo token ids, plus one more token."""
    scored = []
    for choice, length in zip(sorted(choices, key=lambda each: each["index"]), context_lengths, strict=True):
        own = choice["logprobs"]["token_logprobs"][length:-1]
        tokens = choice["logprobs"]["tokens"][length:-1]
        tops = choice["logprobs"]["top_logprobs"][length:-1]
        likeliest = [max(top, key=lambda token: top[token]) for top in tops]
        scored.append(Scored(sum(own), likeliest == tokens))
    return scored


def test_a_prompt_as_long_as_the_context_is_scored_whole(oracle: tuple[Path, Any], model_dir: Path) -> None:
    directory, net = oracle
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, net.config.vocab_size, (128,), generator=generator).tolist()
    with torch.inference_mode():
        rows = net(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    body = {"model": "tiny", "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
    [choice] = answer(directory, model_dir, body)["choices"]
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None and len(found) == len(ids)
    wanted = [float(rows[at - 1, ids[at]]) for at in range(1, len(ids))]
    assert max(abs(ours - theirs) for ours, theirs in zip(found[1:], wanted, strict=True)) < TOLERANCE


def test_loglikelihoods_are_transformers_own(oracle: tuple[Path, Any], model_dir: Path) -> None:
    directory, net = oracle
    vocabulary = net.config.vocab_size
    generator = torch.Generator().manual_seed(4)
    prompts, wanted = [], []
    for case, (context, continuation) in enumerate(CASES):
        ids = torch.randint(3, vocabulary, (context,), generator=generator).tolist()
        with torch.inference_mode():
            for _ in range(continuation):  # in even cases the greedy token, in odd ones another
                best = int(net(torch.tensor([ids])).logits[0, -1].argmax())
                ids.append(best if case % 2 == 0 else (best + 7) % vocabulary)
            rows = net(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        of_tokens = [float(rows[at - 1, ids[at]]) for at in range(context, len(ids))]
        prompts.append(ids)
        wanted.append(Scored(sum(of_tokens), case % 2 == 0))
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
    }
    content = answer(directory, model_dir, {**body, "echo": True})
    scored = as_lm_eval_scores(content["choices"], [context for context, _ in CASES])
    assert [each.is_greedy for each in scored] == [each.is_greedy for each in wanted]
    for ours, theirs in zip(scored, wanted, strict=True):
        assert abs(ours.loglikelihood - theirs.loglikelihood) < TOLERANCE
    assert content["usage"]["prompt_tokens"] == sum(map(len, prompts))
