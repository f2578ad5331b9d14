"""The process that compiles clients' structures for the front, so that a failed compilation cannot kill the front.

A structure is an untrusted program. llguidance limits its own work, but this process does not rely on a library of 50,000
lines. It loads the tokens once and forks a child for each structure. The kernel ends a child that exceeds its processor time
or MEMORY_BYTES of address space, and a crash (a chain of 3,000 references overflows its stack) ends one child: the next
structure waits milliseconds, not for a new process with its libraries. A structure that compiles here within these
limits also compiles on a rank: the same code and tokens, here on a sixteenth of the stack. If the machine ends a child (it is
short of memory or time), this is reported separately, because the structure may be valid.

Input on stdin: the vocabulary as one line of JSON, then one structure per line, with a number and its processor time limit.
Output on stdout: "ready", then one object per structure, with its number, in any order.
"""

import contextlib
import json
import os
import resource
import select
import signal
import sys
import threading
from typing import Any, TextIO

from llguidance import LLTokenizer

from scheduler.policy.request import Structure
from scheduler.structure.compiler import StructureError, vocabulary_from_json
from scheduler.structure.grammar import compile_structure, open_tokenizer, rehearse
from server.machine.parent_death import die_with_parent

MOST_SECONDS = 30  # of wall time for one structure: on a busy machine the processor time limit takes longer
STACK_BYTES = 4 << 20
MEMORY_BYTES = 2 << 30  # of address space; the libraries and the tokens need a quarter
_DIED = "it needs more memory or deeper nesting than is allowed"
_BY_MACHINE = (signal.SIGALRM, signal.SIGKILL)  # no processor time for long, or too little memory


def run_checker(structures: TextIO = sys.stdin) -> int:
    """Answer until stdin ends; return the exit status."""
    die_with_parent()
    with contextlib.suppress(ValueError):  # the parent set a lower limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    tokenizer = open_tokenizer(vocabulary_from_json(structures.readline()))
    _write("ready")
    children: dict[int, int] = {}  # process id -> the structure's number
    signal.signal(signal.SIGCHLD, lambda *_: _reap(children))
    for line in structures:
        asked = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # the child may end before it is recorded
        pid = os.fork()
        if pid == 0:
            _check(asked, tokenizer)
        children[pid] = asked["number"]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    return 0


def _check(asked: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Compile one structure in a child process, answer, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    die_with_parent()
    signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
    signal.alarm(MOST_SECONDS)
    status = 1
    try:
        structure = Structure(asked["kind"], asked["text"], asked["after"])
        answers: list[str | None] = []
        worker = threading.Thread(target=lambda: answers.append(_why_not(structure, tokenizer)))
        worker.start()
        worker.join()
        _write({"number": asked["number"], "why_not": answers[0], "is_slow": False})
        status = 0
    finally:
        os._exit(status)


def _why_not(structure: Structure, tokenizer: LLTokenizer) -> str | None:
    """Compile a structure and follow an answer's first tokens; return the error, or None."""
    try:
        return rehearse(compile_structure(structure, tokenizer))
    except StructureError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - any error is the fault of the untrusted structure
        return f"it is not a valid structure ({type(error).__name__})"


def _reap(children: dict[int, int]) -> None:
    """Answer for children that ended without an answer."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            number = children.pop(pid)
            if status:
                ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
                is_slow, is_unknown = ended_by == signal.SIGPROF, ended_by in _BY_MACHINE
                why_not = None if is_slow or is_unknown else _DIED
                _write({"number": number, "why_not": why_not, "is_slow": is_slow, "is_unknown": is_unknown})


def _write(answer: object) -> None:
    """Write one line at once. Children share the pipe, and writes up to PIPE_BUF are atomic."""
    line = json.dumps(answer, ensure_ascii=False).encode(errors="replace") + b"\n"
    assert len(line) <= select.PIPE_BUF, "scheduler.structure.grammar truncates its messages"
    os.write(sys.stdout.fileno(), line)
