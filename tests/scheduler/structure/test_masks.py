"""Masks are computed in parallel to steps: no step waits long, quick ones come first, and an ambiguous grammar ends its request."""

import queue
import threading
import time

import numpy as np
import pytest

from scheduler.policy.request import Structure
from scheduler.structure import grammar
from scheduler.structure.compiler import CLIENTS_FAULT
from scheduler.structure.grammar import GrammarMatcher, compile_structure
from scheduler.structure.masks import Mask, MaskThreads
from tests.support.requests.structures import (
    NUM_TOKENS,
    TOKENIZER,
    VOCABULARY,
    allowed_by,
    ids_of,
    matcher_of,
)

MASK = Mask(np.zeros(1, np.uint8))
AMBIGUOUS = {
    "three letters": 'start: e\ne: e e | e e e | e e e e | "a" | "b" | "d"',
    "two letters": 'start: e\ne: e e | "a" | "b"',
    "expressions": 'start: e\ne: e "+" e | e "*" e | e "-" e | "(" e ")" | /[0-9]+/',
}


def held_until(event: threading.Event) -> Mask:
    assert event.wait(60)
    return MASK


def test_a_step_waits_for_all_its_masks_together_and_no_longer_than_it_may() -> None:
    masks, may_end = MaskThreads(wait_s=0.05, num_threads=1), threading.Event()
    late = [masks.start(lambda: held_until(may_end), 0.0) for _ in range(20)]
    for _ in range(2):
        masks.begin_step()
        begun_s = time.monotonic()
        assert [masks.wait(each) for each in late] == [False] * 20
        assert time.monotonic() - begun_s < 20 * 0.05
    may_end.set()
    assert [each.result(60) for each in late] == [MASK] * 20
    assert all(masks.wait(each) for each in late), "finished masks must not be waited for"
    masks.close()


def test_what_was_quick_before_is_computed_first() -> None:
    masks, order = MaskThreads(num_threads=1), queue.Queue[str]()
    has_begun, may_begin = threading.Event(), threading.Event()

    def compute(name: str) -> Mask:
        order.put(name)
        return MASK

    def occupy() -> Mask:
        has_begun.set()
        return held_until(may_begin)

    first = masks.start(occupy, 9.0)
    assert has_begun.wait(60)
    rest = [
        masks.start(lambda name=name: compute(name), last_s)
        for name, last_s in (("slow", 0.1), ("quick", 0.001), ("new", 0.0))
    ]
    may_begin.set()
    for each in (first, *rest):
        each.result(60)
    assert [order.get_nowait() for _ in range(3)] == ["new", "quick", "slow"]
    masks.close()


def test_an_error_of_the_library_is_its_requests_alone() -> None:
    masks = MaskThreads(num_threads=1)

    def fail() -> Mask:
        raise RuntimeError("a bug")

    broken, whole = masks.start(fail, 0.0), masks.start(lambda: MASK, 0.0)
    assert whole.result(60) == MASK
    assert "a bug" in broken.result(60).failure
    masks.close()


def with_threads(structure: Structure, masks: MaskThreads) -> GrammarMatcher:
    return GrammarMatcher(
        compile_structure(structure, TOKENIZER), VOCABULARY, ignore_eos=False, threads=masks
    )


def test_a_late_mask_leaves_its_row_and_is_the_same_later() -> None:
    structure, masks = Structure("regex", "ab*"), MaskThreads(wait_s=0.0, num_threads=1)
    may_end = threading.Event()
    blocked = masks.start(lambda: held_until(may_end), -1.0)
    matcher = with_threads(structure, masks)
    for _ in range(2):
        matcher.begin_step()
        row = np.zeros(NUM_TOKENS, np.float32)
        matcher.mask(row)
        assert matcher.is_late and not matcher.is_ready and not row.any() and not matcher.failure
    may_end.set()
    blocked.result(60)
    assert matcher._coming is not None and matcher._coming.result(60)
    matcher.begin_step()
    assert matcher.is_ready and allowed_by(matcher) == allowed_by(matcher_of(structure))
    assert not matcher.is_late
    masks.close()


def follow_to_the_end(name: str) -> tuple[str | None, float, float]:
    """Return why a grammar's request ends, and the longest mask and the longest token in seconds of processor time."""
    masks = MaskThreads(wait_s=60.0, num_threads=1)
    matcher = with_threads(Structure("grammar", AMBIGUOUS[name]), masks)
    mask_s, token_s = 0.0, 0.0
    text = ids_of("1+" if name == "expressions" else "aa")
    for number in range(5000):
        masks.begin_step()
        matcher.begin_step()
        matcher.mask(np.zeros(NUM_TOKENS, np.float32))
        if matcher.is_late:  # requests with slow masks are parked by the scheduler and not waited for
            assert matcher._coming is not None and matcher._coming.result(60)
            matcher.begin_step()
            matcher.mask(np.zeros(NUM_TOKENS, np.float32))
        mask_s = max(mask_s, matcher._last_s)
        if matcher.failure:
            break
        begun_s = time.thread_time()
        matcher.advance(text[number % 2])
        token_s = max(token_s, time.thread_time() - begun_s)
    masks.close()
    return matcher.failure, mask_s, token_s


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_request_ends_when_its_masks_have_used_up_its_budget(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MASK_BUDGET_S", 0.02)
    monkeypatch.setattr(grammar, "MASK_BUDGET_PER_TOKEN_S", 0.0)
    failure, *_ = follow_to_the_end(name)
    assert failure is not None and failure.startswith(CLIENTS_FAULT)
    assert "ambiguous" in failure and "e: t (op t)*" in failure


@pytest.mark.slow
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_its_request_before_it_costs_much(name: str) -> None:
    failure, mask_s, token_s = follow_to_the_end(name)
    assert failure is not None and failure.startswith(CLIENTS_FAULT)
    assert mask_s < 0.1 and token_s < 0.05


def test_limits_let_large_schemas_through() -> None:
    """An object of 500 optional properties needs two thirds of a step's items."""
    names = [f"property_{number}" for number in range(500)]
    properties = ", ".join(f'"{name}": {{"type": "string"}}' for name in names)
    schema = f'{{"type": "object", "additionalProperties": false, "properties": {{{properties}}}}}'
    matcher = matcher_of(Structure("json_schema", schema))
    for token_id in ids_of('{"property_0": "x", "property_480": "y"}'):
        assert token_id in allowed_by(matcher), matcher.failure
        matcher.advance(token_id)
    assert not matcher.failure
