"""Drafts on the GPU path, in Triton's interpreter: tokens and logprobs equal those of the same path without drafts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.foreseeing import foresee
from scheduler.policy.request import Request, TokenBias
from scheduler.policy.speculative import parse_speculative_config
from tests.scheduler.drafts.test_served_drafts import MTP, NGRAM, SUFFIX, always_draft
from tests.scheduler.test_invariance import Answers, collect
from tests.support.engines.serving import request, serve
from tests.support.gpu.path import build_interpreted
from tests.support.models.families import SHALLOW, make_model, write_checkpoint
from tests.support.models.mtp import write_mtp_checkpoint
from tests.support.ranks import RankPool

INTERPRETER_S = 400.0
NEARLY_RIGHT = 0.01  # scale of the output of layers: most drafts are right


def requests() -> list[Request]:
    """Return greedy and seeded requests, one with token rules, one with prompt logprobs."""
    return [
        request("greedy", range(3, 9), max_tokens=7, num_logprobs=1),
        request("drawn", range(9, 14), max_tokens=7, num_logprobs=0, temperature=1.0, seed=3, presence_penalty=0.5),
        request(
            "ruled", (40, 41, 40, 41), max_tokens=7, num_logprobs=0, num_prompt_logprobs=1,
            logit_bias=(TokenBias(9, 50.0), TokenBias(10, 50.0)), frequency_penalty=1.0,
        ),
    ]  # fmt: skip


def answers(
    directory: Path, given: str | None, known: Answers | None, settings: dict[str, Any]
) -> tuple[Answers, list[int]]:
    """Serve all requests together. Return also the numbers of accepted and proposed drafts."""
    counts = [0, 0]
    speculative = parse_speculative_config(given) if given else None
    built = build_interpreted(directory, speculative_config=speculative, batch_invariant=True, **settings)
    if given is not None:
        always_draft(known, counts, built)
    found = collect(serve(built, requests()).outputs)
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks
    return found, counts


def both(directory: Path, given: str, foresees: bool) -> tuple[Answers, Answers, list[int]]:
    """Serve without and with drafts."""
    plain, _ = answers(directory, None, None, {})
    found, counts = answers(directory, given, plain if foresees else None, {})
    return plain, found, counts


@pytest.mark.slow
@pytest.mark.parametrize(("given", "foresees"), [(NGRAM, False), (SUFFIX, True)], ids=["ngram", "foreseen"])
def test_drafts_change_no_bit(given: str, foresees: bool, interpreter: RankPool, tmp_path: Path) -> None:
    make_model("qwen3_moe", num_hidden_layers=1).save_pretrained(tmp_path)
    plain, found, (num_right, num_tried) = interpreter.run(
        both, tmp_path, given, foresees, timeout_s=INTERPRETER_S
    )[0]
    assert found == plain
    assert num_tried > 0 and (num_right > 5 or not foresees)


@pytest.mark.slow
def test_drafts_change_no_token_of_recurrent_models(interpreter: RankPool, tmp_path: Path) -> None:
    """The states of jamba. Those of qwen3_next are below."""
    write_checkpoint("jamba", tmp_path, is_shallow=True)
    plain, found, (num_right, num_tried) = interpreter.run(
        both, tmp_path, SUFFIX, True, timeout_s=INTERPRETER_S
    )[0]
    check_tokens(plain, found)
    assert 5 < num_right < num_tried


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "qwen3_next"])
def test_drafts_of_own_layers_change_no_bit(family: str, interpreter: RankPool, tmp_path: Path) -> None:
    """Latent attention uses two torch products with bits that depend on the number of rows (docs/gpu.md); tokens stay equal."""
    write_mtp_checkpoint(family, tmp_path, change=partial(foresee, share=NEARLY_RIGHT), **SHALLOW[family])
    plain, found, (num_right, num_tried) = interpreter.run(
        both, tmp_path, MTP, False, timeout_s=INTERPRETER_S
    )[0]
    assert 5 < num_right <= num_tried
    if family == "glm4_moe":
        assert found == plain
    check_tokens(plain, found)


def check_tokens(plain: Answers, found: Answers) -> None:
    """Compare tokens exactly, and logprobs up to the effect of the number of rows on torch's products."""
    for name, rows in plain.items():
        assert [token for token, _ in found[name]] == [token for token, _ in rows]
        wanted = [logprob for _, logprob in rows]
        assert [logprob for _, logprob in found[name]] == pytest.approx(wanted, abs=1e-5)
