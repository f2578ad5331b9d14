"""The checker process: hostile structures cost bounded time and memory, and at worst kill their own process."""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from scheduler.policy.request import Request, SamplingParams, Structure
from scheduler.structure.compiler import StructureCompiler, Structured, Vocabulary
from server.front.errors import ApiError
from server.front.structure import checker_process
from server.front.structure.structure_checks import StructureChecks
from tests.support.requests.structures import VOCABULARY

TIMEOUT_S = 90.0

Work = Callable[[StructureChecks], Awaitable[None]]


def with_checks(
    work: Work,
    load: Callable[[], Vocabulary] = lambda: VOCABULARY,
    **how: object,
) -> None:
    """Run a test with its own checker, and check that no process is left."""

    async def run() -> None:
        checks = StructureChecks(load, **how)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await work(checks)
            pid = checks._process.pid if checks._process else None
        finally:
            await checks.close()
        assert pid is None or not Path(f"/proc/{pid}").exists()

    asyncio.run(run())


@pytest.fixture(scope="module")
def with_shared_checks() -> Iterator[Callable[[Work], None]]:
    """Run tests that do not end the checker with the same one, and check at the end that no process is left."""
    with asyncio.Runner() as runner:
        checks = StructureChecks(lambda: VOCABULARY)

        async def in_time(work: Work) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                await work(checks)

        yield lambda work: runner.run(in_time(work))
        pid = checks._process.pid if checks._process else None
        runner.run(checks.close())
    assert pid is None or not Path(f"/proc/{pid}").exists()


def schema(content: object) -> Structure:
    return Structure("json_schema", json.dumps(content))


def _deep(depth: int) -> dict[str, object]:
    content: dict[str, object] = {"type": "string"}
    for _ in range(depth):
        content = {"type": "array", "items": content}
    return content


def _chain(length: int) -> dict[str, object]:
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(length)}
    return {"$defs": {**defs, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


HOSTILE = {
    "deep schema": schema(_deep(60)),
    "very deep schema": Structure("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000),
    "long chain of references": schema(_chain(3000)),
    "reference to itself": schema({"$ref": "#"}),
    "references in a circle": schema(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "allOf of itself": schema({"allOf": [{"$ref": "#"}, {"$ref": "#"}]}),
    "huge enum": schema({"enum": [f"value number {n}" for n in range(10_000)]}),
    "many properties": schema(
        {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(3000)}}
    ),
    "optional properties": schema(
        {"anyOf": [_deep(3), *({"properties": {f"a{n}": _deep(2)}} for n in range(200))]}
    ),
    "huge repetition": Structure("regex", "a{1000000}"),
    "nested repetition": Structure("regex", "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "catastrophic regex": Structure("regex", "(a+)+(a|aa)*b(a*)*c" * 20),
    "many states": Structure("regex", "(.*a.{40}b.*|.*c.{40}d.*){30}"),
    "and of negations": Structure(
        "grammar", "start: T\nT: ~/(?s:.*)a.{30}(?s:.*)/ & ~/(?s:.*)b.{30}(?s:.*)/\n"
    ),
    "deep parentheses": Structure("regex", "(" * 50_000 + "a" + ")" * 50_000),
    "deep grammar": Structure("grammar", "start: " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "left recursion": Structure("grammar", 'start: start start | start | "a" | ""\n'),
    "pattern in a schema": schema(
        {"type": "string", "pattern": "^(([a-z])+.)+[A-Z]([a-z])+$", "maxLength": 100_000}
    ),
    "huge bounds": schema(
        {"type": "array", "minItems": 10**9, "items": {"type": "string", "minLength": 10**9}}
    ),
    "huge numbers": schema(
        {"type": "number", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 1e-300}
    ),
    "schema of another's": schema({"$ref": "http://127.0.0.1:9/schema.json"}),
    "file": schema({"$ref": "file:///etc/passwd"}),
    "every plane": Structure(
        "choice", json.dumps(["".join(map(chr, range(0x100, 0x2000))), "\U0010ffff" * 999])
    ),
    "nothing": Structure("regex", ""),
}

DEADLY = ("long chain of references", "deep parentheses", "catastrophic regex", "file")


def test_forms_are_checked_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    num_loads = 0

    def load() -> Vocabulary:
        nonlocal num_loads
        num_loads += 1
        return VOCABULARY

    async def work(checks: StructureChecks) -> None:
        assert await checks.why_not(Structure("regex", "a+")) is None
        assert "unclosed" in str(await checks.why_not(Structure("regex", "(a")))
        pid = checks._process and checks._process.pid
        monkeypatch.setattr(checks, "_ask", None)  # known structures are not checked again
        assert await checks.why_not(Structure("regex", "a+")) is None
        assert "unclosed" in str(await checks.why_not(Structure("regex", "(a")))
        assert checks._process and checks._process.pid == pid
        assert num_loads == 1

    with_checks(work, load)


@pytest.mark.parametrize("required", [[], ["p0"]])
def test_alternatives_that_begin_alike_are_refused_at_the_check(
    required: list[str], with_shared_checks: Callable[[Work], None]
) -> None:
    """200 objects of 20 properties compile, but each request with them would fail at its third token."""
    properties = {f"p{number}": {"type": "string"} for number in range(20)}
    each = {"type": "object", "properties": properties, "required": required}
    alternatives = [{**each, "additionalProperties": {"const": number}} for number in range(200)]

    async def work(checks: StructureChecks) -> None:
        why = await checks.why_not(schema({"anyOf": alternatives}))
        assert why is not None and why.startswith("the structure is too large or too ambiguous"), why
        assert await checks.why_not(schema({"anyOf": alternatives[:5]})) is None

    with_shared_checks(work)


def test_a_checker_that_died_is_replaced() -> None:
    async def work(checks: StructureChecks) -> None:
        assert await checks.why_not(Structure("regex", "a")) is None
        assert checks._process is not None
        os.kill(checks._process.pid, 9)
        assert checks._reader is not None
        await checks._reader
        assert await checks.why_not(Structure("regex", "b")) is None

    with_checks(work)


SHORT_OF_MEMORY = """
import json, sys
sys.stdin.readline()
print('"ready"', flush=True)
for number, line in enumerate(sys.stdin):
    answer = {"number": json.loads(line)["number"], "why_not": None, "is_slow": False, "is_unknown": number == 0}
    print(json.dumps(answer), flush=True)
"""


TALKATIVE = """
import json, pathlib, sys
sys.stdin.readline()
print('"ready"', flush=True)
is_first = not pathlib.Path(sys.argv[1]).exists()
pathlib.Path(sys.argv[1]).touch()
for line in sys.stdin:
    if is_first:
        print("a library's warning", flush=True)
    else:
        answer = {"number": json.loads(line)["number"], "why_not": None, "is_slow": False, "is_unknown": False}
        print(json.dumps(answer), flush=True)
"""


def test_a_checker_with_an_invalid_answer_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(checks: StructureChecks) -> None:
        with pytest.raises(ApiError, match="The process that checks structures ended"):
            await checks.why_not(Structure("regex", "a"))
        assert await checks.why_not(Structure("regex", "a")) is None

    with_checks(work, command=(sys.executable, "-c", TALKATIVE, str(tmp_path / "begun")))
    assert "an answer of the process that checks structures is invalid" in caplog.text


def test_what_the_machine_ends_is_a_503_and_not_remembered() -> None:
    async def work(checks: StructureChecks) -> None:
        with pytest.raises(ApiError, match=r"short of time or memory\. Try again") as caught:
            await checks.why_not(Structure("regex", "a"))
        assert caught.value.status == 503 and caught.value.headers["Retry-After"]
        assert await checks.why_not(Structure("regex", "a")) is None

    with_checks(work, command=(sys.executable, "-c", SHORT_OF_MEMORY))


@pytest.mark.parametrize(
    "number, expected",
    [
        (signal.SIGALRM, (None, False, True)),  # 30 s of wall-clock time with little CPU time
        (signal.SIGKILL, (None, False, True)),  # the kernel, short of memory
        (signal.SIGPROF, (None, True, False)),
        (signal.SIGSEGV, ("it needs more memory or deeper nesting than is allowed", False, False)),
    ],
)
def test_what_ended_a_child_says_whose_fault_it_is(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, expected: tuple[object, ...]
) -> None:
    written: list[dict[str, object]] = []
    monkeypatch.setattr(checker_process, "_write", written.append)
    child = subprocess.Popen(["sleep", "60"])
    child.send_signal(number)
    monkeypatch.setattr(os, "waitpid", _waiting_for(child.pid, os.waitpid))
    checker_process._reap({child.pid: 5})
    child.returncode = 0  # already reaped
    [answer] = written
    assert (answer["why_not"], answer["is_slow"], answer["is_unknown"]) == expected


def _waiting_for(
    child: int, waitpid: Callable[[int, int], tuple[int, int]]
) -> Callable[[int, int], tuple[int, int]]:
    """Wait for a child's end first, and never for the other children of this process."""
    flags = iter((0,))
    return lambda _pid, given: waitpid(child, next(flags, given))


def test_forms_asked_for_at_once_get_their_own_answers(with_shared_checks: Callable[[Work], None]) -> None:
    async def work(checks: StructureChecks) -> None:
        forms = [Structure("regex", "a" * n if n % 3 else "(" * n) for n in range(1, 20)]
        answers = await asyncio.gather(*map(checks.why_not, forms))
        assert [bool(answer) for answer in answers] == ["(" in form.text for form in forms]

    with_shared_checks(work)


def test_a_checker_that_does_not_start_is_a_503() -> None:
    async def work(checks: StructureChecks) -> None:
        with pytest.raises(ApiError) as caught:
            await checks.why_not(Structure("regex", "a"))
        assert caught.value.status == 503

    with_checks(work, command=("false",))


@pytest.mark.slow
def test_what_overflows_the_checkers_stack_is_refused_and_what_it_takes_compiles_on_a_rank() -> None:
    """A rank that overflowed its stack would end the service. The test finds the longest chain that passes the check."""

    async def work(checks: StructureChecks) -> None:
        assert await checks.why_not(schema(_chain(20_000))) is not None
        longest, too_long = 16, 20_000
        while too_long - longest > longest // 4:
            middle = (longest + too_long) // 2
            passes = await checks.why_not(schema(_chain(middle))) is None
            longest, too_long = (middle, too_long) if passes else (longest, middle)
        compiler, ready = StructureCompiler(lambda: VOCABULARY), queue.Queue[object]()
        params = SamplingParams(max_tokens=1, structure=schema(_chain(longest)))
        compiler.submit(Request(request_id="r", prompt_ids=(1,), params=params, arrival_s=0.0), ready.put)
        assert isinstance(ready.get(timeout=TIMEOUT_S), Structured)

    with_checks(work)


@pytest.mark.parametrize(
    "names", [DEADLY, pytest.param(tuple(HOSTILE), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_hostile_forms_are_answered_in_bounded_time_and_the_next_is_served(
    names: tuple[str, ...], with_shared_checks: Callable[[Work], None]
) -> None:
    async def work(checks: StructureChecks) -> None:
        assert await checks.why_not(Structure("regex", "before")) is None
        process = checks._process
        for name in names:
            async with asyncio.timeout(20):
                await checks.why_not(HOSTILE[name])
            assert await checks.why_not(Structure("regex", f"after {name}")) is None
        assert checks._process is process, "a failed structure does not end the process"

    with_shared_checks(work)


@pytest.mark.crossed("said", every=2)
@pytest.mark.parametrize("said", ["abc", 5, ["abc"], False])
def test_a_schema_s_options_are_an_object(said: object, with_shared_checks: Callable[[Work], None]) -> None:
    """A TypeError used to end the process, and the next structure waited for a new one."""

    async def work(checks: StructureChecks) -> None:
        assert await checks.why_not(schema({"x-guidance": said})) == "x-guidance must be an object"

    with_shared_checks(work)


# Answers at once if the time limit is small. Otherwise it answers only structures that are not "slow".
SCRIPTED = """
import json, sys
sys.stdin.readline()
print('"ready"', flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    is_slow = asked["text"].startswith("slow")
    if asked["cpu_s"] < 1 or not is_slow:
        print(json.dumps({"number": asked["number"], "why_not": None, "is_slow": is_slow}), flush=True)
"""


def test_a_structure_never_waits_for_those_that_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(checks: StructureChecks) -> None:
        slow = [asyncio.create_task(checks.why_not(Structure("regex", f"slow {n}"))) for n in range(60)]
        for n in range(60):
            assert await checks.why_not(Structure("regex", f"quick {n}")) is None
        assert not any(task.done() for task in slow)
        monkeypatch.setattr("server.front.structure.structure_checks.TURN_S", 0.01)
        with pytest.raises(ApiError, match="slow structures are waiting") as caught:
            await checks.why_not(Structure("regex", "slow"), "guided_regex")
        assert (caught.value.status, caught.value.param) == (429, "guided_regex")
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    with_checks(work, command=(sys.executable, "-c", SCRIPTED))


def test_a_checker_that_ends_answers_those_who_wait() -> None:
    async def work(checks: StructureChecks) -> None:
        asking = asyncio.create_task(checks.why_not(Structure("regex", "slow")))
        while not checks._slow.locked():
            await asyncio.sleep(0.01)
        assert checks._process is not None
        checks._process.kill()
        with pytest.raises(ApiError, match="ended"):
            await asking

    with_checks(work, command=(sys.executable, "-c", SCRIPTED))


def test_a_schema_that_nothing_satisfies_is_refused(with_shared_checks: Callable[[Work], None]) -> None:
    async def work(checks: StructureChecks) -> None:
        assert "no token" in str(await checks.why_not(HOSTILE["reference to itself"]))

    with_shared_checks(work)
