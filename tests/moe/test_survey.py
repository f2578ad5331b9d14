"""What `wideep models` says: every type that is known, computed as a start would, and true of what is tested."""

import pytest

from moe.survey import Status, Verdict, moe_types, survey
from tests.support.models.families import FAMILIES, WRAPPED_FAMILIES

# Mistral 3 holds a decoder that has experts or has not; MiniMax-M3 as it is published has sparse layers too.
NOT_TYPES = {"mistral3", "minimax_m3_vl"}


@pytest.mark.parametrize(
    ("model_type", "status", "said"),
    [
        ("qwen3_moe", Status.SERVED, ""),
        ("qwen3_vl_moe", Status.TEXT_PART, ""),
        ("deepseek_v4", Status.REFUSED, "asks its cache for"),
        ("switch_transformers", Status.REFUSED, "encoder-decoder"),
        ("zaya", Status.REFUSED, "no kernel"),
    ],
)
def test_a_type_is_judged_with_a_reason(model_type: str, status: Status, said: str) -> None:
    (found,) = survey([model_type])
    assert found.status is status
    assert said in found.why
    assert bool(found.why) == (status is Status.REFUSED)


def test_types_with_experts_are_found_and_others_are_not() -> None:
    known = moe_types()
    assert {"mixtral", "deepseek_v3", "gemma4", "llama4", "lfm2_moe", "switch_transformers"} <= {*known}
    assert not {"llama", "qwen3", "bert", "whisper"} & {*known}


@pytest.mark.slow
def test_every_type_that_is_tested_is_served() -> None:
    tested = {*FAMILIES, *WRAPPED_FAMILIES} - NOT_TYPES
    known = moe_types()
    assert tested <= {*known}
    verdicts = [*survey(sorted(tested))]
    assert [each for each in verdicts if each.status is Status.REFUSED] == []
    assert isinstance(verdicts[0], Verdict)
