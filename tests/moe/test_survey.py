"""`wideep models` lists every known type, classified as by a start, and consistent with the tested types."""

import re
from pathlib import Path

import pytest
import transformers

from moe.survey import SupportStatus, moe_types, survey
from tests.support.models.families import FAMILIES, RECURRENT_FAMILIES, SPARSE_FAMILIES, WRAPPED_FAMILIES
from tests.support.models.installed import SINCE_5_24, is_pinned, pinned, require_type

DOCS = Path(__file__).parents[2] / "docs" / "models.md"

# Mistral 3's decoder may or may not have experts. MiniMax-M3 as published also has sparse layers.
NOT_TYPES = {"mistral3", "minimax_m3_vl"}


@pytest.mark.parametrize(
    ("model_type", "status", "said"),
    [
        ("qwen3_moe", SupportStatus.SERVED, ""),
        pytest.param("kimi_k2", SupportStatus.SERVED, "", marks=pytest.mark.slow),  # of 61 layers
        ("qwen3_vl_moe", SupportStatus.TEXT_PART, ""),
        pytest.param("step3p5", SupportStatus.TEXT_PART, "", marks=pytest.mark.slow),
        ("deepseek_v4", SupportStatus.REFUSED, "in its cache: it keeps more than"),
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
    accepted_part, _, refused_part = page.partition("\n## Refused")
    accepted = re.findall(r"^\| (\S+/\S+) \| `(\S+)` \| ", accepted_part, re.MULTILINE)
    refused = re.findall(r"^\| (\S+/\S+) \| (?:`(\S+)`|-) \| ", refused_part, re.MULTILINE)
    said = re.search(r"The tables have (\d+) models: (\d+) are accepted, (\d+) are refused", page)
    assert said is not None
    num_models = len({name for name, _ in (*accepted, *refused)})
    assert [*map(int, said.groups())] == [num_models, len(accepted), len(refused)]
    assert len(accepted) >= 65
    section = DOCS.read_text().partition("## Every type with experts")[2].partition("\n| refused")[0]
    served = {*names_in(section)} | {"mistral3"}  # its decoder may or may not have experts
    assert {kind for _, kind in accepted} <= served
    assert {kind for _, kind in refused} & served <= {"bailing_hybrid"}, "one type has two architectures"


@pytest.fixture(scope="module")
def known() -> list[str]:
    """Return all types with experts."""
    return moe_types()


@pytest.mark.slow
def test_types_with_experts_are_found_and_others_are_not(known: list[str]) -> None:
    assert {"mixtral", "deepseek_v3", "gemma4", "llama4", "lfm2_moe", "switch_transformers"} <= {*known}
    assert not {"llama", "qwen3", "bert", "whisper"} & {*known}


@pytest.mark.slow
def test_the_list_in_the_docs_is_true_and_every_type_that_is_tested_is_served(known: list[str]) -> None:
    listed, found = listed_types(), {verdict.model_type: verdict.status for verdict in survey(known)}
    newer = newer_types()
    if is_pinned():
        assert listed == found, "update the list with: wideep models"
    every = {**listed, **newer}  # other versions may have fewer or more types
    assert {name: every.get(name, status) for name, status in found.items()} == found
    if release(transformers.__version__) >= (5, 24):
        assert newer.items() <= found.items()
    tested = {*FAMILIES, *RECURRENT_FAMILIES, *SPARSE_FAMILIES, *WRAPPED_FAMILIES} - NOT_TYPES
    assert tested <= listed.keys() | newer.keys()
    assert all(found.get(name) is not SupportStatus.REFUSED for name in tested)


@pytest.mark.parametrize("model_type", SINCE_5_24)
def test_new_types_are_served(model_type: str) -> None:
    require_type(model_type)
    (found,) = survey([model_type])
    assert found.status is newer_types()[model_type]


def listed_types() -> dict[str, SupportStatus]:
    """Return the types of the pinned transformers as listed in the docs."""
    section = the_list()
    assert f"transformers {pinned('transformers')}" in section, "update the list with: wideep models"
    _, served, text_parts, refused = re.split(
        r"^Served \(|^Served as|^\| refused", section, flags=re.MULTILINE
    )
    rows = [row.split("|")[1] for row in refused.partition("\n\n")[0].splitlines()[2:]]
    return {
        **dict.fromkeys(names_in(served), SupportStatus.SERVED),
        **dict.fromkeys(names_in(text_parts), SupportStatus.TEXT_PART),
        **dict.fromkeys(names_in("".join(rows)), SupportStatus.REFUSED),
    }


def newer_types() -> dict[str, SupportStatus]:
    """Return the additional types of versions newer than the pinned one."""
    rows = [row.split("|") for row in the_list().splitlines() if row.startswith("| 5.")]
    return {name: SupportStatus(row[2].strip()) for row in rows for name in names_in(row[3])}


def the_list() -> str:
    return DOCS.read_text().partition("## Every type with experts")[2].partition("\n## ")[0]


def release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z0-9_-]+)`", text))
