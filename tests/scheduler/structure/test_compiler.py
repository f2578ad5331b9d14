"""The compiler threads: which requests wait, who is notified, and what is cached."""

import json
import queue
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

from scheduler.policy.request import FinishReason, Request, RequestOutput, SamplingParams, Structure
from scheduler.policy.sequence import StructureMatcher
from scheduler.structure.compiler import (
    LONG_CHARS,
    StructureCompiler,
    Structured,
    StructureError,
    Vocabulary,
    _Line,
)
from tests.support.requests.structures import END, OTHER_END, VOCABULARY, ids_of

TIMEOUT_S = 20.0


def request_of(
    request_id: str, structure: Structure, *, ends: tuple[int, ...] = (END, OTHER_END), replayed: str = ""
) -> Request:
    params = SamplingParams(max_tokens=9, structure=structure, stop_token_ids=ends)
    return Request(
        request_id=request_id,
        prompt_ids=(1,),
        params=params,
        arrival_s=0.0,
        replayed_ids=tuple(ids_of(replayed)),
    )


class Gate:
    """Loads the vocabulary once the gate is open, and counts the loads."""

    def __init__(self) -> None:
        self.opened, self.num_loads = threading.Event(), 0

    def __call__(self) -> Vocabulary:
        assert self.opened.wait(TIMEOUT_S)
        self.num_loads += 1
        return VOCABULARY


def compiler_of(is_open: bool = True) -> tuple[StructureCompiler, Gate]:
    gate = Gate()
    if is_open:
        gate.opened.set()
    return StructureCompiler(gate), gate


def ready_of(compiler: StructureCompiler, *requests: Request) -> list[Structured | RequestOutput]:
    ready: queue.Queue[Structured | RequestOutput] = queue.Queue()
    for request in requests:
        compiler.submit(request, ready.put)
    return [ready.get(timeout=TIMEOUT_S) for _ in requests]


def test_a_request_comes_back_with_a_matcher_of_its_own() -> None:
    compiler, gate = compiler_of()
    form = Structure("regex", "ab")
    first, second = ready_of(compiler, request_of("1", form), request_of("2", form))
    assert isinstance(first, Structured) and isinstance(second, Structured)
    assert (first.request.request_id, second.request.request_id) == ("1", "2")
    first.matcher.advance(ord("a"))
    first.matcher.advance(ord("b"))
    assert first.matcher.has_ended and not second.matcher.has_ended
    assert gate.num_loads == 1


def taken(line: _Line, *names: str) -> list[str]:
    """Queue requests, named by owner, number and kind. Return the order in which one thread takes them."""
    jobs = {}
    for name in names:
        text = (
            "a" * (LONG_CHARS + 1) if name.endswith("long") else "a" * (9 if name.endswith("short") else 99)
        )
        asked = replace(request_of(name, Structure("regex", text)), key_id=name[0])
        line.add(asked, lambda _ready: None)
    while (job := line.take()) is not None:
        jobs[job.request.request_id] = job
        line.end(job)
    return list(jobs)


def test_owners_take_turns_and_an_owners_shortest_structure_comes_first() -> None:
    slow = [f"A{number} long" for number in range(4)]
    assert taken(_Line(), *slow, "B1", "B2") == ["A0 long", "B1", "A1 long", "B2", "A2 long", "A3 long"]
    assert taken(_Line(), "A1 long", "A2", "A3 short") == ["A3 short", "A2", "A1 long"]


def test_a_thread_is_kept_free_of_an_owners_second_long_structure() -> None:
    line = _Line()
    for name in ("A1", "A2"):
        asked = replace(request_of(name, Structure("regex", "a" * (LONG_CHARS + 1))), key_id="A")
        line.add(asked, lambda _ready: None)
    first = line.take()
    assert first is not None and line.take() is None, "the other thread must stay free"
    for name, owner in (("A3", "A"), ("B1", "B")):
        line.add(replace(request_of(name, Structure("regex", "a")), key_id=owner), lambda _ready: None)
    short = [line.take(), line.take()]
    assert [job and job.request.request_id for job in short] == ["A3", "B1"]
    line.end(first)
    assert line.take() is None, "it must wait behind a short one of the same owner"
    assert short[0] is not None
    line.end(short[0])
    second = line.take()
    assert second is not None and second.request.request_id == "A2"


def test_a_long_structure_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = compiler_of()
    may_end, ready = threading.Event(), queue.Queue[Structured | RequestOutput]()
    whole = compiler._matcher_for

    def matcher_for(request: Request) -> StructureMatcher:
        if request.request_id.startswith("A"):
            assert may_end.wait(TIMEOUT_S)
        return whole(request)

    monkeypatch.setattr(compiler, "_matcher_for", matcher_for)
    for number in range(5):
        form = Structure("choice", json.dumps(["a" * LONG_CHARS, str(number)]))
        compiler.submit(replace(request_of(f"A{number}", form), key_id="A"), ready.put)
    compiler.submit(replace(request_of("B", Structure("regex", "a")), key_id="B"), ready.put)
    first = ready.get(timeout=TIMEOUT_S)
    assert isinstance(first, Structured) and first.request.request_id == "B"
    may_end.set()
    rest = [ready.get(timeout=TIMEOUT_S) for _ in range(5)]
    assert all(isinstance(each, Structured) for each in rest)
    compiler.close()


def test_replayed_tokens_are_followed() -> None:
    compiler, _ = compiler_of()
    (ready,) = ready_of(compiler, request_of("1", Structure("regex", "abc"), replayed="ab"))
    assert isinstance(ready, Structured)
    ready.matcher.advance(ord("c"))
    assert ready.matcher.has_ended


def test_what_cannot_be_compiled_ends_the_request_and_nobody_else() -> None:
    compiler, _ = compiler_of()
    wrong, right = ready_of(
        compiler, request_of("1", Structure("regex", "(")), request_of("2", Structure("regex", "a"))
    )
    assert isinstance(wrong, RequestOutput) and isinstance(right, Structured)
    assert wrong.finish_reason is FinishReason.ERROR and "cannot be compiled" in wrong.error


def test_a_rank_without_a_tokenizer_says_so() -> None:
    def none() -> Vocabulary:
        raise StructureError("no tokenizer in here")

    for compiler in (StructureCompiler(), StructureCompiler(none)):
        (ready,) = ready_of(compiler, request_of("1", Structure("regex", "a")))
        assert isinstance(ready, RequestOutput) and "tokenizer" in ready.error


def test_a_rank_without_llguidance_says_so_to_those_who_ask_for_a_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "scheduler.structure.grammar", raising=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    (ready,) = ready_of(compiler_of()[0], request_of("1", Structure("regex", "a")))
    assert isinstance(ready, RequestOutput) and "this rank cannot import llguidance" in ready.error


def test_an_engine_that_nobody_asks_for_forms_runs_without_llguidance() -> None:
    code = "import scheduler.structure.compiler, sys; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 0


def test_a_request_that_was_forgotten_does_not_come_back() -> None:
    compiler, gate = compiler_of(is_open=False)
    ready: queue.Queue[Structured | RequestOutput] = queue.Queue()
    compiler.submit(request_of("1", Structure("regex", "a")), ready.put)
    compiler.submit(request_of("2", Structure("regex", "a")), ready.put)
    assert compiler.forget("1") and not compiler.forget("1") and not compiler.forget("3")
    gate.opened.set()
    left = ready.get(timeout=TIMEOUT_S)
    assert isinstance(left, Structured) and left.request.request_id == "2"
    assert ready.empty() and not compiler.forget("2")


def test_a_request_that_comes_again_is_not_replaced_by_its_earlier_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was forgotten while it waited, and has more tokens from another rank."""
    compiler, _ = compiler_of()
    has_begun, may_end = threading.Event(), threading.Event()
    ready: queue.Queue[Structured | RequestOutput] = queue.Queue()
    whole = compiler._matcher_for

    def matcher_for(request: Request) -> StructureMatcher:
        if not request.replayed_ids:
            has_begun.set()
            assert may_end.wait(TIMEOUT_S)
        return whole(request)

    monkeypatch.setattr(compiler, "_matcher_for", matcher_for)
    form = Structure("regex", "abc")
    compiler.submit(request_of("1", form), ready.put)
    assert has_begun.wait(TIMEOUT_S) and compiler.forget("1")
    compiler.submit(request_of("1", form, replayed="ab"), ready.put)
    may_end.set()
    compiler.submit(request_of("2", form), ready.put)  # the last job of all
    found = []
    for _ in range(2):
        one = ready.get(timeout=TIMEOUT_S)
        assert isinstance(one, Structured)
        found.append((one.request.request_id, len(one.request.replayed_ids)))
    assert found == [("1", 2), ("2", 0)]
    compiler.close()


def test_whoever_hears_that_a_request_does_not_wait_finds_it_handed_over() -> None:
    """An abort or a withdrawal must not overtake the request."""
    compiler, _ = compiler_of()
    order: queue.Queue[str] = queue.Queue()
    has_asked = threading.Event()

    def forget() -> None:
        assert not compiler.forget("1")
        order.put("it waits no more")
        has_asked.set()

    asking = threading.Thread(target=forget)

    def take(_ready: Structured | RequestOutput) -> None:
        asking.start()
        has_asked.wait(0.2)  # the answer comes after this
        order.put("handed over")

    compiler.submit(request_of("1", Structure("regex", "a")), take)
    assert [order.get(timeout=TIMEOUT_S) for _ in range(2)] == ["handed over", "it waits no more"]
    asking.join(TIMEOUT_S)


@pytest.mark.parametrize("error", [StructureError("no tokenizer"), TypeError("not iterable"), MemoryError()])
def test_whatever_goes_wrong_the_request_ends(error: Exception) -> None:
    def load() -> Vocabulary:
        raise error

    [ended] = ready_of(StructureCompiler(load), request_of("r", Structure("regex", "a")))
    assert isinstance(ended, RequestOutput) and ended.finish_reason is FinishReason.ERROR
    assert "the structure cannot be compiled" in ended.error
