"""A team of threads that runs programs of kernels. Free threads take the next tile; no thread waits for a sleeping one.

A program is a list of rows. Each row holds a kernel's address and its arguments: addresses and sizes. A kernel is
compiled code `(tile, *arguments) -> int`: for tile -1 it returns its number of tiles, for others it computes one.
Kernels run one after the other. The tiles of a kernel run at the same time, in any order, and must not depend on each
other. A program runs without the interpreter lock, and the bits of a result do not depend on which thread took a tile.

The thread that calls `run` computes too. After a program the others spin for a while (within a step, the next program
comes some microseconds later), then yield their core while they look for work, then sleep. A thread that the system
takes off its core delays only its own tile, and threads that wait for that tile yield.
Rejected: OpenMP's regions through numba's `prange`. One preempted thread delays all of their static parts, and
sleeping threads take 50 us to wake (docs/LOG.md).
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, ParamSpec

import numpy as np

from dispatch.compiled.native import (
    CACHE_LINE_BYTES,
    ROW_WORDS,
    Addressed,
    call_row,
    compiled,
    fetch_add,
    futex_wait,
    futex_wake,
    load,
    pause,
    replace_if,
    store,
    yield_now,
)

ROW_BYTES = 8 * (1 + ROW_WORDS)
_LINE = CACHE_LINE_BYTES
# Offsets of a team's words, each in a separate cache line.
_TAKE = 0  # the kernel's number << 44 | its tiles << 22 | the next tile
_DONE = _LINE  # computed tiles of the kernel
_ROW = 2 * _LINE  # address of the kernel's row
_LEFT = 3 * _LINE  # rows after it
_BUSY = 4 * _LINE  # 1 while a program runs
_RUNS = 5 * _LINE  # programs so far; sleepers watch this word
_ASLEEP = 6 * _LINE  # threads that sleep or are about to
_CLOSED = 7 * _LINE
_LINES = 8
_TILE_BITS, _NUMBER_BITS = 22, 19
_TILE_MASK, _NUMBER_MASK = (1 << _TILE_BITS) - 1, (1 << _NUMBER_BITS) - 1
_PAUSES = 200  # some 10 us
_YIELDS = 2000  # about a millisecond on an otherwise idle core
_SLEEP_NS = 1_000_000_000
SHARED_NS = 50_000  # less work than this is not worth waking another thread

_Arguments = ParamSpec("_Arguments")
# `Kernel.row` returns rows of this type; several rows are one program.
Program = np.ndarray[tuple[int, int], np.dtype[np.int64]]


class Kernel(Addressed, Generic[_Arguments]):
    """Compiled code that a program runs: `(tile, *arguments) -> number of tiles` for tile -1."""

    def __init__(self, function: Callable[Concatenate[int, _Arguments], int], version: int) -> None:
        """Arguments are words: addresses, sizes, and bits of floats (`bits_of`). `version` is as in `Addressed`."""
        super().__init__(function, version)
        code = self._function.__code__
        # By their place in a row; the kernel's address has the place of `tile`.
        self._names = code.co_varnames[: code.co_argcount]

    def row(self, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> list[int]:
        """Return one row of a program."""
        num_given, names = len(args) + len(kwargs), self._names[1:]
        assert num_given == len(names), f"{num_given} arguments for {', '.join(names)}"
        given: tuple[Any, ...] = (*args, *(kwargs[name] for name in names[len(args) :]))
        return [self.address, *given, *[0] * (ROW_WORDS - len(given))]

    def place(self, name: str) -> int:
        """Return the index of an argument in a row."""
        return self._names.index(name)


def program_of(rows: Sequence[list[int]]) -> Program:
    """Return the program of these rows."""
    return np.array(rows, dtype=np.int64).reshape(len(rows), 1 + ROW_WORDS)


@compiled
def _open_next(team: int, number: int) -> None:
    # Publish the next kernel that has a tile. After the last one, publish that no kernel runs.
    row, left = load(team + _ROW), load(team + _LEFT)
    while left > 0:
        row += ROW_BYTES
        left -= 1
        tiles = call_row(row, -1)
        if tiles > 0:
            store(team + _ROW, row)
            store(team + _LEFT, left)
            store(team + _TAKE, (number & _NUMBER_MASK) << (2 * _TILE_BITS) | tiles << _TILE_BITS)
            return
    store(team + _TAKE, (number & _NUMBER_MASK) << (2 * _TILE_BITS))
    store(team + _BUSY, 0)


@compiled
def _do_tile(team: int) -> int:
    # Returns 0 if there is no tile to take.
    take = load(team + _TAKE)
    tile, tiles = take & _TILE_MASK, (take >> _TILE_BITS) & _TILE_MASK
    if tile >= tiles:
        return 0
    row = load(team + _ROW)
    if replace_if(team + _TAKE, take, take + 1) == 0:
        return 1  # another thread was faster
    call_row(row, tile)
    if fetch_add(team + _DONE, 1) + 1 == tiles:
        store(team + _DONE, 0)
        _open_next(team, (take >> (2 * _TILE_BITS)) + 1)
    return 1


@compiled
def _run(team: int, program: int, num_rows: int) -> None:
    number = (load(team + _TAKE) >> (2 * _TILE_BITS)) + 1
    store(team + _ROW, program - ROW_BYTES)
    store(team + _LEFT, num_rows)
    store(team + _BUSY, 1)
    _open_next(team, number)
    fetch_add(team + _RUNS, 1)
    if load(team + _ASLEEP) > 0:
        futex_wake(team + _RUNS)
    idle = 0
    while load(team + _BUSY) != 0:
        if _do_tile(team) != 0:
            idle = 0
            continue
        idle += 1
        if idle < _PAUSES:
            pause()
        else:
            yield_now()


@compiled
def _run_alone(program: int, num_rows: int) -> None:
    for index in range(num_rows):
        row = program + index * ROW_BYTES
        for tile in range(call_row(row, -1)):
            call_row(row, tile)


@compiled
def _help(team: int, scratch: int) -> None:
    idle = 0
    while load(team + _CLOSED) == 0:
        if _do_tile(team) != 0:
            idle = 0
            continue
        idle += 1
        if idle < _PAUSES:
            pause()
        elif idle < _YIELDS or load(team + _BUSY) != 0:
            yield_now()
        else:
            runs = load(team + _RUNS)
            fetch_add(team + _ASLEEP, 1)
            # A runner sets _BUSY before it reads _ASLEEP, and a sleeper raises _ASLEEP before it reads _BUSY.
            if load(team + _BUSY) == 0 and load(team + _CLOSED) == 0:
                futex_wait(team + _RUNS, runs, _SLEEP_NS, scratch)
            fetch_add(team + _ASLEEP, -1)
            idle = 0


class Team:
    """Threads of this process. Only one thread at a time may run programs with them.

    Attributes:
        num_threads: Number of threads, including the caller's.
    """

    def __init__(self, num_threads: int) -> None:
        """Start all threads except the caller's."""
        self.num_threads = num_threads
        self._room = np.zeros((_LINES + 2 * num_threads) * _LINE // 8 + _LINE // 8, np.int64)
        self._address = -(-self._room.ctypes.data // _LINE) * _LINE
        scratch = self._address + _LINES * _LINE
        helpers = [
            threading.Thread(target=_help, args=(self._address, scratch + index * _LINE), daemon=True)
            for index in range(num_threads - 1)
        ]
        self.close: Callable[[], object] = weakref.finalize(self, _end, self._room, self._address, helpers)
        for helper in helpers:
            helper.start()

    def run(self, program: Program) -> None:
        """Run a program's kernels in order and return when all are done. The caller owns all memory that it names."""
        if self.num_threads == 1:
            run_alone(program)
        else:
            _run(self._address, program.ctypes.data, len(program))


def run_alone(program: Program) -> None:
    """Run a program on the calling thread."""
    _run_alone(program.ctypes.data, len(program))


def run(program: Program, team: Team | None, one_thread_ns: int) -> None:
    """Run a program on a team. Runs on the calling thread if there is no team or too little work.

    Args:
        one_thread_ns: Approximate time on one thread.
    """
    if team is not None and one_thread_ns > SHARED_NS:
        team.run(program)
    else:
        run_alone(program)


@compiled
def _close(team: int) -> None:
    store(team + _CLOSED, 1)
    fetch_add(team + _RUNS, 1)
    futex_wake(team + _RUNS)


def _end(_room: np.ndarray, address: int, helpers: list[threading.Thread]) -> None:
    _close(address)
    for helper in helpers:
        helper.join()
