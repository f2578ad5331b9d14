"""What `wideep models` says: every type that is known, computed as a start would, and true of what is tested."""

import re
from pathlib import Path

import pytest
import transformers

from moe.survey import SupportStatus, moe_types, survey
from tests.support.models.families import FAMILIES, RECURRENT_FAMILIES, SPARSE_FAMILIES, WRAPPED_FAMILIES

DOCS = Path(__file__).parents[2] / "docs" / "models.md"

# Mistral 3 holds a decoder that has experts or has not; MiniMax-M3 as it is published has sparse layers too.
NOT_TYPES = {"mistral3", "minimax_m3_vl"}


@pytest.mark.parametrize(
    ("model_type", "status", "said"),
    [
        ("qwen3_moe", SupportStatus.SERVED, ""),
        ("kimi_k2", SupportStatus.SERVED, ""),
        ("qwen3_vl_moe", SupportStatus.TEXT_PART, ""),
        ("step3p5", SupportStatus.TEXT_PART, ""),
        ("deepseek_v4", SupportStatus.REFUSED, "asks its cache for"),
        ("switch_transformers", SupportStatus.REFUSED, "encoder-decoder"),
        ("zaya", SupportStatus.REFUSED, "no kernel"),
    ],
)
def test_a_type_is_judged_with_a_reason(model_type: str, status: SupportStatus, said: str) -> None:
    (found,) = survey([model_type])
    assert found.status is status
    assert said in found.why
    assert bool(found.why) == (status is SupportStatus.REFUSED)


def test_the_page_of_published_models_agrees_with_the_list_of_types() -> None:
    page = (DOCS.parent / "published.md").read_text()
    rows = re.findall(r"^\| (\S+/\S+) \| (?:`(\S+)`|-) \| \w+ \| (.+) \|$", page, re.MULTILINE)
    accepted = [(name, kind) for name, kind, verdict in rows if verdict.startswith("accepted")]
    refused = [(name, kind) for name, kind, verdict in rows if verdict.startswith("refused: ")]
    said = re.search(r"The (\d+) Mixture.*?: (\d+) are accepted, (\d+) are refused", page, re.DOTALL)
    assert said is not None
    assert [*map(int, said.groups())] == [len({name for name, _, _ in rows}), len(accepted), len(refused)]
    assert len(accepted) >= 65
    section = DOCS.read_text().partition("## Every type with experts")[2].partition("\n| refused")[0]
    served = {*names_in(section)} | {"mistral3"}  # whose decoder has experts or has not
    assert {kind for _, kind in accepted} <= served
    assert {kind for _, kind in refused} & served <= {"bailing_hybrid"}, "one type of two architectures"


@pytest.mark.slow
def test_types_with_experts_are_found_and_others_are_not() -> None:
    known = moe_types()
    assert {"mixtral", "deepseek_v3", "gemma4", "llama4", "lfm2_moe", "switch_transformers"} <= {*known}
    assert not {"llama", "qwen3", "bert", "whisper"} & {*known}


@pytest.mark.slow
def test_the_list_in_the_docs_is_true_and_every_type_that_is_tested_is_served() -> None:
    section = DOCS.read_text().partition("## Every type with experts")[2].partition("\n## ")[0]
    assert f"transformers {transformers.__version__}" in section, "write it again: wideep models"
    _, served, text_parts, refused = re.split(
        r"^Served \(|^Served as|^\| refused", section, flags=re.MULTILINE
    )
    listed = {
        SupportStatus.SERVED: names_in(served),
        SupportStatus.TEXT_PART: names_in(text_parts),
        SupportStatus.REFUSED: {
            name for row in refused.splitlines()[2:] if "|" in row for name in names_in(row.split("|")[1])
        },
    }
    found: dict[SupportStatus, set[str]] = {status: set() for status in SupportStatus}
    for verdict in survey(moe_types()):
        found[verdict.status].add(verdict.model_type)
    assert listed == found
    tested = {*FAMILIES, *RECURRENT_FAMILIES, *SPARSE_FAMILIES, *WRAPPED_FAMILIES} - NOT_TYPES
    assert tested <= found[SupportStatus.SERVED] | found[SupportStatus.TEXT_PART]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_-]+)`", text))
