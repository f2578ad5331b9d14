"""Messages survive encoding and decoding, with any content."""

import itertools
import json
import math
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from expert_placement.load import LoadFigures
from expert_placement.placement import linear_placement
from kvcache.images import Image
from kvcache.tiers.figures import TierFigures
from scheduler.epochs.orders import Order
from scheduler.moves.reports import Cause, ExpertMap, LoadReport, MoveState, PlacementReport
from scheduler.policy.request import (
    DraftCounts,
    FinishReason,
    ForgetPrefixes,
    Logprobs,
    MemoryOrder,
    RankStats,
    Request,
    RequestOutput,
    SamplingParams,
)
from scheduler.weights.versions import (
    FileFacts,
    WeightAction,
    WeightDigests,
    WeightFolder,
    WeightOrder,
    WeightReport,
    WeightState,
    WeightVersion,
)
from server.link import messages
from server.link.messages import (
    Abort,
    Claim,
    Claimed,
    DropPlacement,
    Expect,
    Fault,
    Goodbye,
    MemorySwitched,
    MemoryUse,
    PlacementUpdate,
    PoolClaim,
    Prepare,
    RankFacts,
    Regrouped,
    StepOutput,
    Stop,
    Welcome,
    decode,
    encode,
)
from server.link.ranks import Ranks
from server.options.pools import Pool, Role

ENTRY = Logprobs(5, -0.1 - 1e-17, [5, 6], [-0.5, float("-inf")], 1)
TOKENS: tuple[list[int], ...] = ([], [5], [5, 2**32 - 1])
ENTRIES: tuple[list[Logprobs], ...] = ([], [ENTRY, ENTRY])
PLACEMENT = linear_placement(3, 5, 2).with_version(9)
FACTS = RankFacts(
    rank=0, world_size=2, host="hôte", pid=7, max_model_len=128, num_blocks=9, block_tokens=16, max_num_seqs=4,
    max_num_batched_tokens=64, device="cpu",
)  # fmt: skip
REPORT = PlacementReport(
    rank=1, version=3, state=MoveState.FAILED, reason="why", cause=Cause.CHECK_SUM, seconds=0.1
)


def test_every_combination_of_empty_parts_comes_back() -> None:
    parts = itertools.product(
        *(TOKENS, ENTRIES, ENTRIES, (0, 7), (0.0, 0.25), (None, *FinishReason), ("", "a fault"))
    )
    for token_ids, logprobs, prompt_logprobs, num_cached_tokens, queued_s, finish_reason, error in parts:
        output = RequestOutput(
            request_id="a",
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached_tokens,
            queued_s=queued_s,
            finish_reason=finish_reason,
            error=error,
        )
        assert decode(encode(StepOutput([output], None))) == StepOutput([output], None)


OUTPUT_FIELDS = [field.name for field in fields(RequestOutput)]


def test_the_last_fields_are_omitted_if_they_are_their_defaults() -> None:
    assert json.loads(encode(StepOutput([RequestOutput(request_id="a", token_ids=[5])], None))) == [
        "StepOutput",
        [[["a", [5]]], None],
    ]
    late = RequestOutput(request_id="a", token_ids=[], finish_reason=FinishReason.STOP)
    [[written], _] = json.loads(encode(StepOutput([late], None)))[1]
    assert written[-1] == "stop" and len(written) == OUTPUT_FIELDS.index("finish_reason") + 1


@pytest.mark.parametrize("value", [-0.0, 0, False])
def test_a_value_that_only_equals_a_default_is_kept(value: float) -> None:
    names = ("logprobs", "error", "num_draft_tokens", "is_returned", "finish_reason")
    output = RequestOutput(request_id="a", token_ids=[1], queued_s=value)
    [back] = decode(encode(StepOutput([output], None))).outputs
    assert math.copysign(1, back.queued_s) == math.copysign(1, value) and type(back.queued_s) is type(value)
    assert all(getattr(back, name) == getattr(output, name) for name in names)


@pytest.mark.parametrize("num_fields", [0, 1, len(OUTPUT_FIELDS) + 1])
def test_a_record_with_too_few_or_too_many_fields_is_an_error(num_fields: int) -> None:
    content = json.dumps(["StepOutput", [[["a", *[[]] * len(OUTPUT_FIELDS)][:num_fields]], None]]).encode()
    with pytest.raises(LookupError):
        decode(content)


def numbered(kind: type) -> dict[str, Any]:
    """Return a different number for each field."""
    return {name: at for at, name in enumerate(kind.__annotations__, start=1)}


VERSION = WeightVersion(3, "v", (WeightFolder("/a", (FileFacts("b", 1, 2),)),), True, "digest")
TIERS = TierFigures(**numbered(TierFigures) | {"load_s": 0.1 + 1e-17, "is_disk_off": True})


@pytest.mark.parametrize(
    "message",
    [
        FACTS,
        replace(FACTS, memory=MemoryOrder(7, has_cache=False)),
        replace(FACTS, weights=WeightOrder(action=WeightAction.SERVE, version=VERSION)),
        WeightOrder(action=WeightAction.STAGE, version=VERSION),
        WeightReport(rank=1, number=3, state=WeightState.FAILED, reason="why", num_bytes=1 << 40),
        MemoryOrder(8, has_experts=False),
        MemorySwitched(8),
        StepOutput(
            [], RankStats(**numbered(RankStats) | {"drafts": DraftCounts(3, 9, (3, 2, 1)), "tiers": None})
        ),
        StepOutput([], RankStats(**numbered(RankStats) | {"drafts": DraftCounts(), "tiers": TIERS})),
        Regrouped(4),
        Fault(4, "why", True),
        MemoryUse(1 << 40),
        Goodbye(""),
        Welcome(),
        Stop(),
        Abort("a"),
        Claim("node", 0, 2),
        Claim("node", 1, 2, PoolClaim("long", Role.PREFILL, "run", 3, 4)),
        Claimed(5, 6, 1, pool=Pool("long", Role.DECODE, 2, 4)),
        Claimed(-1, 0, 0, "why", may_come=True),
        Expect("a", None),
        DropPlacement(2),
        ForgetPrefixes(1_764_000_000_000_000_000),
        PlacementUpdate(REPORT, None, 0),
    ],
)
def test_a_message_comes_back(message: Any) -> None:
    back = decode(encode(message))
    assert back == message and type(back) is type(message)


def test_placements_keep_their_digest_and_version() -> None:
    sent = (Prepare(PLACEMENT), PlacementUpdate(REPORT, PLACEMENT, 5), Order(4, (0, 2), PLACEMENT))
    for back in (decode(encode(each)) for each in sent):
        assert (back.placement.digest(), back.placement.version) == (PLACEMENT.digest(), 9)
    assert decode(encode(sent[2]))[:2] == (4, (0, 2))


def test_an_expected_request_carries_no_rows_of_images() -> None:
    image = Image("ab" * 32, 1, 3, path="/nowhere")
    request = Request(
        request_id="r", prompt_ids=(5, 9, 9, 9), params=SamplingParams(max_tokens=1), arrival_s=0.0, images=(image,)
    )  # fmt: skip
    posted: list[Any] = []
    ranks: Any = SimpleNamespace(post=lambda _rank, message: posted.append(message))
    Ranks.expect(ranks, 1, request, now_s=0.0)
    [message] = posted
    assert message.submit.request.images == (image,), "its file was not opened"


def test_arrays_keep_type_and_shape() -> None:
    counts = np.arange(12, dtype=np.uint32).reshape(2, 2, 3)
    slots = np.array([[0, -1]], np.int64)
    figures = LoadFigures(steps=1, wait_causes_s=np.array([0.5, 0.0]), dispatch_bytes=np.array([1, 2**40]))
    load = LoadReport(rank=1, step=2, placement_version=3, counts=counts, figures=figures)
    back, experts = decode(encode(load)), decode(encode(ExpertMap(1, 2, 3, (0, 4), 5, slots)))
    np.testing.assert_array_equal(back.counts, counts, strict=True)
    assert isinstance(back.figures, LoadFigures)
    for arrived, sent in zip(back.figures, figures, strict=True):
        np.testing.assert_array_equal(arrived, sent, strict=True)
    np.testing.assert_array_equal(experts.slot_expert, slots, strict=True)
    assert experts[:5] == (1, 2, 3, (0, 4), 5)
    sums = np.array([[1 << 63, 0]], np.uint64)
    sent_report = WeightReport(rank=1, number=3, state=WeightState.STAGED, digests=WeightDigests("ab", sums))
    digests = decode(encode(sent_report)).digests
    assert digests.plain == "ab"
    np.testing.assert_array_equal(digests.experts_LE, sums, strict=True)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'["Popen", []]', b'["Abort", []]', b'["Fault", 7]', b"\xff"]
)
def test_what_is_no_message_is_an_error(content: bytes) -> None:
    with pytest.raises((ValueError, TypeError, LookupError)):
        decode(content)


def test_another_definition_is_another_digest() -> None:
    assert messages._definition((Abort,)) != messages._definition((Abort, Stop))
