"""What ranks derive from each other's headers, and that a rank keeps its announcements."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch.wires.mailbox import open_mailbox
from kvcache.blocks import BlockPool
from scheduler.policy.config import DispatchMode
from scheduler.policy.scheduler import Scheduler
from scheduler.step.lockstep import (
    Agreement,
    Decision,
    Header,
    LockStep,
    LockStepError,
    StepFlag,
    WeightsStep,
    agree_on_switch,
    agree_on_tokens,
    agree_on_weights,
    cause_of_waiting,
    decide,
    describe_modes,
    versions_of,
    versions_word,
)
from tests.support.engines.serving import request


def header(*, step: int = 1, work: int = 1, stopping: int = 0, prefill: int = 0, decodes: int = 0) -> Header:
    flags = work * StepFlag.WORK | stopping * StepFlag.STOPPING | (prefill > 0) * StepFlag.PREFILL
    return Header(step, 0, 0, flags, decodes, 0, prefill, 0)


class FakeMailbox:
    """Another rank with a given header, next to this one."""

    def __init__(self, other: Header) -> None:
        self.posted: list[int] = []
        self.other = other

    def post(self, values: list[int]) -> None:
        self.posted = list(values)

    def collect(self, timeout_s: float) -> list[list[int]]:
        return [self.posted, list(self.other)]

    def interrupt(self, error: Exception) -> None: ...

    def close(self) -> None: ...


def test_all_run_when_one_has_work_and_sleep_when_none_has() -> None:
    assert decide([header(work=0), header()]) is Decision.RUN
    assert decide([header(work=0), header(work=0)]) is Decision.SLEEP
    assert decide([header(), header(stopping=1)]) is Decision.STOP


def test_ranks_at_different_steps_end_the_service() -> None:
    with pytest.raises(LockStepError, match=r"\(1, 0, 0\), \(2, 0, 0\)"):
        decide([header(), header(step=2)])


def test_a_step_of_decodes_has_room_for_the_rank_with_most() -> None:
    headers = [header(decodes=3), header(decodes=17), header(work=0)]
    assert agree_on_tokens(headers, DispatchMode.AUTO, 512) == 32


def test_one_ranks_prompt_makes_the_step_normal_for_all() -> None:
    assert agree_on_tokens([header(decodes=3), header(prefill=1)], DispatchMode.AUTO, 512) == 0


def test_small_prompts_leave_a_step_of_gpus_in_low_latency_mode() -> None:
    """In normal mode the host waits for the device in every layer."""
    small, arriving = (
        [header(decodes=3, prefill=1020), header(decodes=7)],
        header()._replace(flags=StepFlag.WORK | StepFlag.PREFILL),
    )
    assert agree_on_tokens(small, DispatchMode.AUTO, 8192, 1024) == 1024
    assert agree_on_tokens([arriving, header(decodes=7)], DispatchMode.AUTO, 8192, 1024) == 1024
    assert agree_on_tokens([header(decodes=5, prefill=1020)], DispatchMode.AUTO, 8192, 1024) == 0
    assert agree_on_tokens([header(decodes=3), header(decodes=7)], DispatchMode.AUTO, 8192, 1024) == 8
    assert agree_on_tokens(small, DispatchMode.NORMAL, 8192, 1024) == 0
    assert "those of up to 1024 tokens too" in describe_modes(DispatchMode.AUTO, 64, 8192, 1024)


def test_a_rank_waits_for_what_another_has_more_of_and_costs_most() -> None:
    own = header(decodes=4)._replace(num_context=100)
    longer, more = own._replace(num_context=200), header(decodes=5)
    assert cause_of_waiting(own, [own, own], None) == "other"
    assert cause_of_waiting(own, [own, longer], None) == "contexts"
    assert cause_of_waiting(own, [own, longer, more], None) == "decodes"
    assert cause_of_waiting(own, [own, longer, more, header(prefill=64)], None) == "prefill"
    prompts = header(decodes=4, prefill=64)
    assert cause_of_waiting(prompts, [prompts, header(decodes=4, prefill=500)], None) == "prefill"
    assert cause_of_waiting(prompts, [prompts, header(decodes=5, prefill=500)], 64) == "decodes", "64 each"
    assert cause_of_waiting(prompts, [own, prompts], None) == "contexts", "it is the rank with the prompt"


def test_a_forced_mode_is_taken_whatever_ranks_have() -> None:
    for headers in ([header(decodes=3)], [header(prefill=1)]):
        assert agree_on_tokens(headers, DispatchMode.NORMAL, 512) == 0
        assert agree_on_tokens(headers, DispatchMode.LOW_LATENCY, 500) == 512


def test_the_modes_are_described_with_their_room() -> None:
    assert "room for 8 to 64 tokens per rank" in describe_modes(DispatchMode.AUTO, 64, 512)
    assert "room for 512 tokens" in describe_modes(DispatchMode.LOW_LATENCY, 64, 512)
    assert describe_modes(DispatchMode.NORMAL, 64, 512) == "every step is dispatched in normal mode"


def test_agreeing_moves_to_the_next_step() -> None:
    mailbox = FakeMailbox(header(step=0, decodes=9))
    lockstep = LockStep(mailbox, epoch=0, timeout_s=1.0)
    lockstep.post(has_work=True, is_stopping=False, has_prefill=False, num_decodes=2)
    assert lockstep.agree() == Agreement(Decision.RUN, 16, wait_cause="decodes")
    assert lockstep.step == 1


@pytest.mark.parametrize(
    ("own", "other", "budget", "others"), [(64, 16, 0, 16), (8, 500, 300, 300), (0, 0, 0, 0)]
)
def test_an_agreement_says_how_many_prompt_tokens_the_other_ranks_announced(
    own: int, other: int, budget: int, others: int
) -> None:
    mailbox = FakeMailbox(header(step=0, decodes=1, prefill=other)._replace(prefill_budget=budget))
    lockstep = LockStep(mailbox, epoch=0, timeout_s=1.0)
    lockstep.post(has_work=True, is_stopping=False, has_prefill=own > 0, num_decodes=2, num_prefill=own)
    assert lockstep.agree().others_prefill == others


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=40), st.integers(6, 40))
def test_no_step_has_more_tokens_than_its_rank_announced(
    arrivals: list[tuple[int, int]], num_blocks: int
) -> None:
    """Requests arrive between announcement and step, blocks run out, requests are preempted. A step announced as
    decode-only still fits the agreed size, and all requests are served."""
    scheduler = Scheduler(
        BlockPool(num_blocks, block_tokens=4), max_num_seqs=8, max_num_batched_tokens=24, max_model_len=24
    )
    waiting = [request(f"{i}", [5] * min(n, 20), max_tokens=3) for i, (_, n) in enumerate(arrivals)]
    pauses = [pause for pause, _ in arrivals]
    ended, steps = 0, 0
    while ended < len(arrivals):
        coming = scheduler.next_step
        headers = [header(prefill=int(coming.has_prefill), decodes=coming.num_decodes)]
        agreed = agree_on_tokens(headers, DispatchMode.AUTO, 24)
        for _ in range(pauses.pop(0) if pauses else len(waiting)):
            if waiting:
                scheduler.add(waiting.pop(0))
        num_decodes = scheduler.next_step.num_decodes
        batch = scheduler.schedule(prefill_budget=max(0, agreed - num_decodes) if agreed else None)
        assert not agreed or batch.num_tokens <= agreed
        samples = sum(item.samples for item in batch.items)
        outputs = scheduler.commit(batch, [7] * samples, [None] * samples)
        ended += sum(output.finish_reason is not None for output in outputs)
        steps += 1
        assert steps < 2000, "a request is never served"


def test_ranks_switch_when_all_are_ready_for_the_same_placement() -> None:
    def told(*ready: int) -> int | None:
        return agree_on_switch([header()._replace(placement_version=3, ready_version=v) for v in ready])

    assert told(3, 3, 3) is None
    assert told(4, 3, 4) is None
    assert told(4, 5, 4) is None
    assert told(4, 4, 4) == 4


def test_a_switch_is_agreed_on_once_and_later_headers_speak_of_the_new_placement() -> None:
    mailbox = open_mailbox("local", None, width=len(Header._fields))
    lockstep = LockStep(mailbox, epoch=0, timeout_s=1.0, placement_version=6)
    nothing = {"has_work": False, "is_stopping": False, "has_prefill": False, "num_decodes": 0}
    switches = []
    for ready in (None, 7, 7, None):
        lockstep.post(**nothing, ready_version=ready)  # type: ignore[arg-type]
        switches.append(lockstep.agree().switch_to)
    assert switches == [None, 7, None, None]
    assert lockstep.placement_version == 7


def test_ranks_regroup_when_all_have_the_same_order_and_stopping_goes_before() -> None:
    def told(*ordered: int, stopping: int = 0) -> Decision:
        return decide([header(work=0, stopping=stopping)._replace(epoch=3, ordered_epoch=v) for v in ordered])

    assert told(3, 3) is Decision.SLEEP
    assert told(4, 3) is Decision.SLEEP
    assert told(5, 4) is Decision.SLEEP
    assert told(5, 5) is Decision.REGROUP
    assert told(5, 5, stopping=1) is Decision.STOP


def test_no_placement_is_switched_to_at_the_step_at_which_ranks_regroup() -> None:
    mailbox = open_mailbox("local", None, width=len(Header._fields))
    lockstep = LockStep(mailbox, epoch=2, timeout_s=1.0, step=70)
    lockstep.post(
        has_work=True, is_stopping=False, has_prefill=False, num_decodes=1, ready_version=1, ordered_epoch=3
    )
    agreement = lockstep.agree()
    assert (agreement.decision, agreement.switch_to) == (Decision.REGROUP, None)
    assert (lockstep.step, lockstep.placement_version) == (71, 0)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_headers_word_holds_two_versions_and_a_flag(is_prepared: bool) -> None:
    most = (1 << 31) - 1
    for serving, ready in ((0, 0), (3, 4), (most, most), (0, most), (most, 0)):
        word = versions_word(serving, ready, is_prepared=is_prepared)
        assert versions_of(word) == (serving, ready, is_prepared)
        assert 0 <= word < 1 << 63
    with pytest.raises(AssertionError, match="version 2147483648 of the weights does not fit"):
        versions_word(0, most + 1)


def test_ranks_know_a_step_ahead_that_one_of_them_releases_requests() -> None:
    lockstep = LockStep(FakeMailbox(header()), epoch=0, timeout_s=1.0, step=1)
    found = []
    for is_own, is_other in ((False, False), (True, False), (False, True)):
        flags = StepFlag.WORK | is_other * StepFlag.RELEASING
        lockstep._mailbox.other = header(step=lockstep.step)._replace(flags=flags)  # type: ignore[attr-defined]
        lockstep.post(has_work=True, is_stopping=False, has_prefill=False, num_decodes=1, is_releasing=is_own)
        found.append(lockstep.agree().is_releasing)
    assert found == [False, True, True]


def agreed_weights(*told: tuple[int, bool], decision: Decision = Decision.RUN) -> WeightsStep:
    """Return what ranks that serve version 3 agree on, given which version each could switch to and whether it is prepared."""
    words = [versions_word(3, ready, is_prepared=is_prepared) for ready, is_prepared in told]
    return agree_on_weights([header()._replace(weights=word) for word in words], decision)


def test_ranks_switch_to_weights_that_all_have_loaded_and_prepared() -> None:
    assert agreed_weights((3, True), (3, True)) == WeightsStep()
    assert agreed_weights((4, True), (3, True)) == WeightsStep()
    assert agreed_weights((4, True), (4, True)) == WeightsStep(switch_to=4)
    assert agreed_weights((4, True), (4, True), decision=Decision.SLEEP) == WeightsStep(switch_to=4)
    for decision in (Decision.STOP, Decision.REGROUP):
        assert agreed_weights((4, True), (4, True), decision=decision) == WeightsStep()


def test_all_ranks_prepare_until_each_is_prepared() -> None:
    for told in (((4, False), (4, False)), ((4, True), (4, False)), ((4, False), (4, True))):
        assert agreed_weights(*told) == WeightsStep(prepares=4)
        assert agreed_weights(*told, decision=Decision.SLEEP) == WeightsStep(switch_to=4)
        for decision in (Decision.STOP, Decision.REGROUP):
            assert agreed_weights(*told, decision=decision) == WeightsStep()
    assert agreed_weights((4, False), (3, True)) == WeightsStep(), "a rank has not loaded it"
    assert agreed_weights((4, False), (5, True)) == WeightsStep(), "ranks have loaded different versions"


def test_a_rank_alone_prepares_before_it_switches() -> None:
    mailbox = open_mailbox("local", None, width=len(Header._fields))
    lockstep = LockStep(mailbox, epoch=0, timeout_s=1.0)
    found = []
    for is_prepared in (False, True):
        word = versions_word(0, 1, is_prepared=is_prepared)
        lockstep.post(has_work=True, is_stopping=False, has_prefill=False, num_decodes=1, weights=word)
        agreement = lockstep.agree()
        found.append((agreement.weights_number, agreement.prepares))
    assert found == [(None, 1), (1, None)]


@pytest.mark.parametrize(("mode", "room"), [(DispatchMode.AUTO, 0), (DispatchMode.LOW_LATENCY, 64)])
def test_the_step_of_a_switch_has_room_for_prompts(mode: DispatchMode, room: int) -> None:
    """Requests that decode start again from their prompts in this step."""
    mailbox = open_mailbox("local", None, width=len(Header._fields))
    lockstep = LockStep(mailbox, epoch=0, timeout_s=1.0, mode=mode, max_num_batched_tokens=64)
    found = []
    for word in (versions_word(0, 0), versions_word(0, 1)):
        lockstep.post(
            has_work=True,
            is_stopping=False,
            has_prefill=False,
            num_decodes=3,
            prefill_budget=16,
            weights=word,
        )
        agreement = lockstep.agree()
        found.append((agreement.agreed_tokens, agreement.has_prefill, agreement.prefill_budget))
    assert found == [(room or 8, False, 16), (room, True, None)]


def test_ranks_that_serve_different_weights_end_the_service() -> None:
    headers = [header()._replace(weights=versions_word(v, 4)) for v in (3, 4)]
    with pytest.raises(LockStepError, match=r"ranks serve versions \[3, 4\] of the weights"):
        agree_on_weights(headers, Decision.RUN)
