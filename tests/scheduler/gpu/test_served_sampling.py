"""An engine on the GPU path serves the tokens that the CPU would choose from its logits, and its host reads once per step."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from scheduler.policy.batch import StepBatch
from scheduler.policy.request import Logprobs, Structure, TokenBias
from scheduler.policy.sequence import TokenContext
from scheduler.sampling.sampler import Drawing, HostSampler, Sampled, Sampler
from scheduler.structure.compiler import Vocabulary
from tests.support.engines.serving import request, serve
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import VOCABULARY, make_model
from tests.support.models.no_reads import CountedReads
from tests.support.ranks import RankPool
from tests.support.requests.logprobs import close

pytestmark = [
    pytest.mark.slow,
]
END = 2  # end-of-sequence id of the families
BYTES = Vocabulary(
    tokens=(b"<pad>", b"<begin>", b"<end>", *(bytes([byte]) for byte in range(3, VOCABULARY))),
    special_ids=frozenset({0, 1, END}),
    end_ids=frozenset({END}),
)
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"num_logprobs": 3},
    "seeded": {**DRAWN, "top_p": 0.8, "top_k": 40, "num_logprobs": 0},
    "least": {**DRAWN, "min_p": 0.05, "num_prompt_logprobs": 2},
    "penalised": {**DRAWN, "repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "biased": {"logit_bias": (TokenBias(9, 100.0), TokenBias(10, 100.0)), "frequency_penalty": 2.0},
    "stopping": {"logit_bias": (TokenBias(END, 100.0),), "min_tokens": 2, "stop_token_ids": (END,)},
    "allowed": {**DRAWN, "allowed_token_ids": (30, 31, 32, 33), "bad_words": ((31,), (30, 32))},
    "scored": {"num_logprobs": 1, "logprob_token_ids": (5, 6, 7), "presence_penalty": 1.0},
    "structured": {"structure": Structure("regex", "[a-f]{2}-[0-9]{9}"), "num_logprobs": 2},
    "drawn form": {**DRAWN, "structure": Structure("choice", '["red", "green"]'), "stop_token_ids": (END,)},
}


class Found(NamedTuple):
    """Outputs of an engine, the CPU's samples from the same logits, and the reads of each step."""

    token_ids: dict[str, list[int]]
    pairs: dict[str, list[tuple[Logprobs | None, Logprobs | None]]]  # logprobs, ours and the CPU's
    wanted_ids: dict[str, list[int]]
    prompt_pairs: list[tuple[Logprobs, Logprobs]]
    reads: list[tuple[bool, list[str]]]  # whether the step had prompts, and its reads


class TwoSamplers:
    """Samples on the device, and records the CPU's samples from the same logits. The CPU's reads do not count."""

    def __init__(self, sampler: Sampler, reads: list[str]) -> None:
        self._sampler, self._reads = sampler, reads
        self.found = Found({}, {}, {}, [], [])

    def begin(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Drawing:
        sampled = self.sample(logits_RV, contexts)
        return SimpleNamespace(  # type: ignore[return-value]
            token_R=torch.tensor(sampled.token_ids), is_settled=True, read=lambda: sampled
        )

    def sample(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Sampled:
        raw_RV = logits_RV.clone()
        ours = self._sampler.sample(logits_RV, contexts)
        count = len(self._reads)
        wanted = HostSampler().sample(raw_RV, contexts)
        del self._reads[count:]
        for each, token, *pair in zip(
            contexts, wanted.token_ids, ours.logprobs, wanted.logprobs, strict=True
        ):
            name = each.request.request_id
            self.found.wanted_ids.setdefault(name, []).append(token)
            self.found.pairs.setdefault(name, []).append((pair[0], pair[1]))
        return ours

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        ours = self._sampler.score(logits_CV, next_ids, num_top)
        wanted = HostSampler().score(logits_CV, next_ids, num_top)
        self.found.prompt_pairs.extend(zip(ours, wanted, strict=True))
        return ours


def answers(directory: Path) -> Found:
    """Serve all requests together."""
    built = build_interpreted(
        directory, load_vocabulary=lambda: BYTES, max_num_seqs=len(FIELDS), max_num_batched_tokens=64
    )
    guard = CountedReads()
    built.runner._sampler = both = TwoSamplers(built.runner._sampler, guard.reads)
    run: Callable[..., Sampled] = built.runner.run

    def counted(batch: StepBatch, agreed_tokens: int = 0, **options: Any) -> Sampled:
        guard.reads.clear()
        with guard:
            sampled = run(batch, agreed_tokens, **options)
        if any(item.samples for item in batch.items):
            both.found.reads.append((batch.num_prefill_tokens > 0, [*guard.reads]))
        return sampled

    built.runner.run = counted  # type: ignore[method-assign]
    prompts = [range(3 + 7 * place, 8 + 7 * place) for place in range(len(FIELDS))]
    asked = [
        request(name, prompt, max_tokens=4, **fields)
        for prompt, (name, fields) in zip(prompts, FIELDS.items(), strict=True)
    ]
    return both.found._replace(token_ids=serve(built, asked).token_ids)


@pytest.fixture(scope="module")
def found(interpreter: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return the results of a one-layer model."""
    directory = tmp_path_factory.mktemp("served")
    make_model("mixtral", num_hidden_layers=1).save_pretrained(directory)
    served: Found = interpreter.run(answers, directory, timeout_s=400.0)[0]
    return served


@pytest.mark.parametrize("name", FIELDS)
def test_a_request_gets_the_tokens_and_logprobs_of_sampling_on_the_cpu(found: Found, name: str) -> None:
    assert len(found.token_ids[name]) > 2 and found.token_ids[name] == found.wanted_ids[name]
    for ours, wanted in found.pairs[name]:
        assert close(ours, wanted), (ours, wanted)
        assert (ours is not None) == ("num_logprobs" in FIELDS[name])


def test_prompt_tokens_get_the_logprobs_of_the_cpu(found: Found) -> None:
    assert len(found.prompt_pairs) == 4
    for ours, wanted in found.prompt_pairs:
        assert close(ours, wanted) and ours.rank > 0, (ours, wanted)


def test_the_fields_had_their_effect(found: Found) -> None:
    token_ids = found.token_ids
    assert set(token_ids["biased"]) <= {9, 10}
    assert len(token_ids["stopping"]) == 3 and token_ids["stopping"].index(END) == 2
    assert set(token_ids["allowed"]) <= {30, 32, 33}
    assert bytes(token_ids["structured"][:2]).isalpha() and token_ids["structured"][2] == ord("-")


def test_a_whole_decode_step_has_exactly_one_read(found: Found) -> None:
    decodes = [reads for has_prompts, reads in found.reads if not has_prompts]
    assert len(decodes) >= 3 and all(reads == ["numpy of a tensor"] for reads in decodes)
