"""Primitives for compiled code that numba does not offer: atomics, futexes, a clock and memory by address.

Everything takes and returns int64. The caller guarantees that addresses are valid: nothing is checked here.
Loads acquire and stores release, as in the C++ memory model; `fence` is sequentially consistent.
Linux only (futex(2)); x86-64 and aarch64.

Numba's cache checks only the file of the cached function: after a change here, delete `__pycache__`.
"""

import platform
import struct
from collections.abc import Callable
from functools import cached_property, partial
from types import FunctionType
from typing import Any, TypeVar

from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from dispatch.compiled.turns import compile_in_turn, compile_in_turns

CACHE_LINE_BYTES = 64
ROW_WORDS = 23  # of a row of a program, after the function's address
_MACHINE = platform.machine()
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(_MACHINE, -1)  # asm/unistd.h
_SYS_SCHED_YIELD = {"x86_64": 24, "aarch64": 124}.get(_MACHINE, -1)
_FUTEX_WAIT = 0  # linux/futex.h; not the PRIVATE forms, because waiters are in several processes
_FUTEX_WAKE = 1
_CLOCK_MONOTONIC = 1

_Function = TypeVar("_Function", bound=Callable[..., Any])
compiled: Callable[[_Function], _Function] = njit(cache=True, nogil=True)
"""Compile for int64 arguments, with a cache on disk. The compiled function runs without the interpreter lock."""
inlined: Callable[[_Function], _Function] = njit(cache=True, nogil=True, inline="always")
_emitted: Callable[[Callable[..., Any]], Any] = intrinsic

_I64 = types.int64
_syscall = types.ExternalFunction("syscall", _I64(_I64, _I64, _I64, _I64, _I64, _I64, _I64))
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, _I64))


def is_supported() -> bool:
    """Return whether this module supports this machine."""
    return platform.system() == "Linux" and _SYS_FUTEX >= 0


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@_emitted
def load(typing_context: Any, address: Any) -> Any:
    """Load the word at `address`, acquire."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "acquire", 8, typ=ir.IntType(64))

    return _I64(_I64), emit


@_emitted
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Store `value` at `address`, release."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "release", 8)
        return context.get_dummy_value()

    return types.void(_I64, _I64), emit


@_emitted
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add `value` to the word at `address`, sequentially consistent, and return the old value."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return _I64(_I64, _I64), emit


@_emitted
def replace_if(typing_context: Any, address: Any, seen: Any, value: Any) -> Any:
    """Store `value` at `address` if it still holds `seen`, sequentially consistent. Returns 1 if stored, 0 if not."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = _word(builder, args[0])
        pair = builder.cmpxchg(word, args[1], args[2], "seq_cst", "seq_cst")
        return builder.zext(builder.extract_value(pair, 1), ir.IntType(64))

    return _I64(_I64, _I64, _I64), emit


@_emitted
def fence(typing_context: Any) -> Any:
    """Order every access before it with every access after it, for all processes."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@_emitted
def pause(typing_context: Any) -> Any:
    """Hint to the core that this is a spin loop."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if _MACHINE == "x86_64":  # an LLVM intrinsic: numba's code generator takes no inline assembly
            signature_of = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, signature_of, "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.void(), emit


@_emitted
def copy(typing_context: Any, to: Any, source: Any, num_bytes: Any) -> Any:
    """memcpy. The ranges do not overlap."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        target = builder.inttoptr(args[0], cgutils.voidptr_t)
        origin = builder.inttoptr(args[1], cgutils.voidptr_t)
        cgutils.raw_memcpy(builder, target, origin, args[2], 1)
        return context.get_dummy_value()

    return types.void(_I64, _I64, _I64), emit


@_emitted
def call_row(typing_context: Any, row: Any, tile: Any) -> Any:
    """Call an `Addressed` function with `tile` and a row's words. Its address is the row's first word.

    A function with fewer parameters ignores the last words, as the calling conventions of both machines allow.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, (row, tile) = ir.IntType(64), args
        places = (builder.add(row, ir.Constant(word, 8 * index)) for index in range(1 + ROW_WORDS))
        function, *given = [builder.load(_word(builder, place)) for place in places]
        kind = ir.FunctionType(word, [word] * (1 + ROW_WORDS)).as_pointer()
        return builder.call(builder.inttoptr(function, kind), [tile, *given])

    return _I64(_I64, _I64), emit


@_emitted
def float_of(typing_context: Any, word: Any) -> Any:
    """Return the float32 with the bits of a word's lower half. Inverse of `bits_of`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], ir.IntType(32)), ir.FloatType())

    return types.float32(_I64), emit


def bits_of(value: float) -> int:
    """Return the bits of a float32 as an integer, for compiled code that takes words."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@_emitted
def pointer(typing_context: Any, address: Any) -> Any:
    """Convert an address to a pointer for `carray`."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(_I64), emit


@inlined
def words(address: int, count: int) -> Any:
    """View `count` int64 at `address`."""
    return carray(pointer(address), (count,), types.int64)


@inlined
def int32s(address: int, count: int) -> Any:
    """View `count` int32 at `address`."""
    return carray(pointer(address), (count,), types.int32)


@inlined
def floats(address: int, count: int) -> Any:
    """View `count` float32 at `address`."""
    return carray(pointer(address), (count,), types.float32)


@inlined
def uint16s(address: int, count: int) -> Any:
    """View `count` uint16 at `address`."""
    return carray(pointer(address), (count,), types.uint16)


@inlined
def uint8s(address: int, count: int) -> Any:
    """View `count` bytes at `address`."""
    return carray(pointer(address), (count,), types.uint8)


@inlined
def aligned(num_bytes: int) -> int:
    """Round a size up to whole cache lines."""
    return (num_bytes + CACHE_LINE_BYTES - 1) // CACHE_LINE_BYTES * CACHE_LINE_BYTES


@compiled
def now_ns(scratch: int) -> int:
    """Read the monotonic clock; `scratch` is the address of two words."""
    _clock_gettime(types.int32(_CLOCK_MONOTONIC), scratch)
    clock = words(scratch, 2)
    return int(clock[0] * 1_000_000_000 + clock[1])


@compiled
def futex_wait(address: int, seen: int, timeout_ns: int, scratch: int) -> None:
    """Sleep until woken or until the timeout. Return at once if the low 32 bits at `address` differ from `seen`'s."""
    timespec = words(scratch, 2)
    timespec[0] = timeout_ns // 1_000_000_000
    timespec[1] = timeout_ns % 1_000_000_000
    _syscall(_SYS_FUTEX, address, _FUTEX_WAIT, seen & 0xFFFFFFFF, scratch, 0, 0)


@compiled
def futex_wake(address: int) -> None:
    """Wake all sleepers on `address`."""
    _syscall(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


@compiled
def yield_now() -> None:
    """Let other threads run on this core."""
    _syscall(_SYS_SCHED_YIELD, 0, 0, 0, 0, 0, 0)


def renamed(function: Callable[..., Any], suffix: str) -> FunctionType:
    """Copy a function under a unique name.

    Numba's symbols consist of a name and a number that differs between processes. Without a unique name, code that one
    process cached would call functions of the same name of another.
    """
    assert isinstance(function, FunctionType)
    name = f"{function.__name__}_{suffix}"
    copy = FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__qualname__, copy.__module__ = name, function.__module__
    return copy


class Addressed:
    """A function of int64 arguments that compiled code calls by address. Compiled, or read from the cache, on first use.

    Attributes:
        name: Name of the compiled code, the same in all processes.
    """

    def __init__(self, function: Callable[..., int], version: int) -> None:
        """`version` changes with code that the function inlines from other files, which numba's cache does not check."""
        self._function = renamed(function, f"{version:08x}")
        self.name = f"{self._function.__module__}.{self._function.__name__}"

    def compile(self) -> None:
        """Compile the function, or read it from the cache."""
        assert self.address

    @cached_property
    def address(self) -> int:
        """Address of the compiled code, valid for the life of the process."""
        compile_in_turn(self.name, self._compile)
        address: int = self._compiled.address
        return address

    def _compile(self) -> None:
        signature = _I64(*[_I64] * self._function.__code__.co_argcount)
        self._compiled = cfunc(signature, cache=True, error_model="numpy")(self._function)


def compile_all(*functions: Callable[..., Any]) -> None:
    """Compile functions of int64 arguments, or read them from the cache, so that no peer waits for that later."""
    compile_in_turns(
        {f"{each.__module__}.{each.__name__}": partial(_compile_words, each) for each in functions}
    )


def _compile_words(function: Any) -> None:
    function.compile((_I64,) * function.py_func.__code__.co_argcount)
