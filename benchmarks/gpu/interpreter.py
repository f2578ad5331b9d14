"""Triton's interpreter without work that it repeats at every operation.

Triton 3.6 spends most of the time of an interpreted kernel on work without a result:

- Before each launch, and before each call of a function within a kernel, it replaces the names of `triton.language` that its
  compiler implements. It looks through all of them. After a launch, it restores the names for a compiler.
- It computes each sum and product of integers again in 64 bits for an assertion that it then drops.
- It describes each result again: shapes are tuples that compute types for their elements, types of blocks write their names,
  and numpy's type is looked up in a table that is built for this.

A process that interprets kernels compiles none, so names are replaced once per function. Descriptions are kept, or made when
they are read. Results have the same bits (tests/benchmarks/gpu/test_interpreter.py).
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

KNOWN = "3.6."  # versions of Triton with the classes that are replaced here


class _Kept:
    """What the interpreter has replaced, which stays replaced."""

    def restore(self) -> None:
        """Do nothing."""


def patch_once() -> None:
    """If this process interprets kernels (TRITON_INTERPRET=1), make their operations cheaper.

    Other versions of Triton, without the function that replaces names, stay as they are.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch: Callable[[object], object] | None = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ == __name__:
        return
    done: set[object] = set()
    kept = _Kept()

    def patch_first(function: object) -> _Kept:
        if function not in done:
            patch(function)
            done.add(function)
        return kept

    interpreter._patch_lang = patch_first
    triton = getattr(interpreter, "triton", None)
    if triton is not None and triton.__version__.startswith(KNOWN):
        _skip_dropped_assertions(interpreter.interpreter_builder)
        _keep_numpy_types(interpreter)
        _describe_tuples_late(interpreter.tl.core)
        _keep_shapes_of_types(interpreter.tl.core)
        _keep_shapes_of_tensors(interpreter.tl.core)
        _broadcast_only_other_shapes(type(interpreter.interpreter_semantic))


def _skip_dropped_assertions(builder: Any) -> None:
    """Do not compute the operands of assertions about overflows, which are dropped without `debug`."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _keep_numpy_types(interpreter: Any) -> None:
    look_up = interpreter._get_np_dtype
    found: dict[tuple[bool, str], Any] = {}

    def numpy_type(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        key = scalar.is_ptr(), scalar.name
        if key not in found:
            found[key] = look_up(scalar)
        return found[key]

    interpreter._get_np_dtype = numpy_type


def _describe_tuples_late(core: Any) -> None:
    """Compute a tuple's type when it is read: shapes are tuples, and the interpreter reads no type of a shape."""
    look_up = core.tuple.__getattr__

    def create(self: Any, args: Any, type: Any = None) -> None:
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def attribute(self: Any, name: str) -> Any:
        if name != "type":
            return look_up(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    core.tuple.__init__, core.tuple.__getattr__ = create, attribute


def _keep_shapes_of_types(core: Any) -> None:
    """Check a block's shape once, and write the name of its type when it is read."""
    create_first = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def create(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in known:
            create_first(self, element_ty, shape)
            known[key] = self.shape, self.numel
            return
        self.element_ty = element_ty
        self.shape, self.numel = known[key]

    def attribute(self: Any, name: str) -> str:
        if name != "name":
            raise AttributeError(name)
        self.name = f"<{self.shape}, {self.element_ty}>"
        return str(self.name)

    core.block_type.__init__, core.block_type.__getattr__ = create, attribute
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's types are the language's


def _keep_shapes_of_tensors(core: Any) -> None:
    none, one = core.tuple([]), core.constexpr(1)
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def create(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = none, one
        if type.is_block():
            key = tuple(type.shape.values)
            if key not in known:
                known[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(type.numel)
            self.shape, self.numel = known[key]

    core.tensor.__init__ = create


def _broadcast_only_other_shapes(semantic: Any) -> None:
    broadcast = semantic.broadcast_impl_value

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        ours, theirs = lhs.type, rhs.type
        are_blocks = ours.is_block()
        is_same = are_blocks == theirs.is_block() and not (
            are_blocks and ours.shape.values != theirs.shape.values
        )
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_others
