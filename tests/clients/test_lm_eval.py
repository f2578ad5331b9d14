"""lm_eval's local-completions against a real service: loglikelihoods equal transformers' to 1e-4."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.service.real_service import RealService, write_tiny_model

instance = pytest.importorskip("lm_eval.api.instance", reason="needs lm_eval: make test-clients")
models = pytest.importorskip(
    "lm_eval.models.openai_completions", reason="needs lm_eval[api]: make test-clients"
)

pytestmark = pytest.mark.slow

PAIRS = [
    ("the cat sat on", " the mat"),
    ("hello", " world"),
    ("the cat sat on the mat" * 4, " hello"),  # lm_eval moves a context's last blanks into the continuation
    ("on", " the cat é😀"),
    ("x", "y"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny Qwen3-MoE with a tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    """Run `wideep serve` on two ranks."""
    with RealService.serve(model, tmp_path_factory.mktemp("service") / "output.txt") as running:
        yield running.wait_ready()


def oracle(model: Path, context: str, continuation: str) -> tuple[float, bool]:
    """Return the continuation's loglikelihood by transformers, and whether greedy decoding would produce it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    context_ids = tokenizer.encode(context, add_special_tokens=False)
    wanted = tokenizer.encode(context + continuation, add_special_tokens=False)[len(context_ids) :]
    with torch.no_grad():
        logits_TV = whole(torch.tensor([context_ids + wanted])).logits[0].float()
    rows_TV = torch.log_softmax(logits_TV, dim=-1)[len(context_ids) - 1 : -1]
    ids_T = torch.tensor(wanted)
    return float(rows_TV.gather(1, ids_T[:, None]).sum()), bool((rows_TV.argmax(-1) == ids_T).all())


@pytest.mark.parametrize("batch_size", [1, 4])
def test_loglikelihoods_equal_transformers(service: RealService, model: Path, batch_size: int) -> None:
    lm = models.LocalCompletionsAPI(
        base_url=f"{service.url}/v1/completions",
        model="tiny",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        batch_size=batch_size,
        num_concurrent=1,
        max_retries=1,
    )
    requests = [
        instance.Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=place)
        for place, pair in enumerate(PAIRS)
    ]
    for pair, (logprob, is_greedy) in zip(PAIRS, lm.loglikelihood(requests, disable_tqdm=True), strict=True):
        expected, expected_greedy = oracle(model, *pair)
        assert logprob == pytest.approx(expected, abs=1e-4), pair
        assert is_greedy == expected_greedy, pair


def test_generation_stops_where_it_is_told(service: RealService, model: Path) -> None:
    lm = models.LocalCompletionsAPI(
        base_url=f"{service.url}/v1/completions",
        model="tiny",
        tokenizer=str(model),
        tokenizer_backend="huggingface",
        batch_size=1,
        max_retries=1,
    )
    ask = {"until": ["\n\n"], "max_gen_toks": 12, "temperature": 0.0}
    requests = [instance.Instance(request_type="generate_until", doc={}, arguments=("the cat", ask), idx=0)]
    [text] = lm.generate_until(requests, disable_tqdm=True)
    assert isinstance(text, str)
    assert "\n\n" not in text
