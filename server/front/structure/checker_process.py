"""The process in which the front compiles what clients send: it may die of it, the front may not.

A form is a program by a stranger. llguidance bounds its own work, but a library of 50,000 lines is not taken at its
word: here the kernel ends a compilation that takes more than CPU_S of processor time or MEMORY_BYTES of address space,
and a crash (a chain of 3,000 references overflows its stack) is one refused request. What compiles here within these
bounds compiles on a rank as well: it is the same code over the same tokens, on a stack of a sixteenth.

On stdin: the vocabulary as one line of JSON, then one form per line. On stdout: "ready", then one JSON string per form:
why it cannot be compiled, empty if it can.
"""

import contextlib
import json
import resource
import signal
import sys
import threading
from typing import TextIO

from llguidance import LLTokenizer

from scheduler.policy.request import Structure
from scheduler.structure.compiler import StructureError, vocabulary_from_json
from scheduler.structure.grammar import compile_structure, error_of, open_tokenizer
from server.parent_death import die_with_parent

CPU_S = 2.0  # for one form
STACK_BYTES = 4 << 20
MEMORY_BYTES = 2 << 30  # of address space, of which the libraries and the tokens take a quarter


def run_checker(forms: TextIO = sys.stdin, answers: TextIO = sys.stdout) -> int:
    """Answer until stdin ends; returns the exit status."""
    die_with_parent()
    with contextlib.suppress(ValueError):  # a lower limit was set outside
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=_answer, args=(forms, answers))
    worker.start()
    worker.join()
    return 0


def _answer(forms: TextIO, answers: TextIO) -> None:
    tokenizer = open_tokenizer(vocabulary_from_json(forms.readline()))
    _say(answers, "ready")
    for line in forms:
        _say(answers, _why_not(Structure(**json.loads(line)), tokenizer))


def _why_not(structure: Structure, tokenizer: LLTokenizer) -> str:
    """Compile a form and its first mask, under a timer whose signal ends this process."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        matcher = compile_structure(structure, tokenizer)
        matcher.compute_bitmask()
        return error_of(matcher)
    except StructureError as error:
        return str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _say(answers: TextIO, text: str) -> None:
    answers.write(json.dumps(text) + "\n")
    answers.flush()
