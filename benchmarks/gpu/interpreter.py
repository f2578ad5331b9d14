"""Triton's interpreter without work that it repeats at every operation.

Triton 3.6 spends most of the time of an interpreted kernel on work without a result:

- Before each launch, and before each call of a function within a kernel, it replaces the names of `triton.language` that its
  compiler implements. It looks through all of them. After a launch, it restores the names for a compiler.
- It computes each sum and product of integers again in 64 bits for an assertion that it then drops.
- It describes each result again: shapes are tuples that compute types for their elements, types of blocks write their names,
  and numpy's type is looked up in a table that is built for this.
- It finds the type of each sum or product again, and makes each number in a kernel a tensor, and then a block, every time.
- Each function of the language is called through two others, which sort its arguments.

A process that interprets kernels compiles none, so names are replaced once per function. Descriptions and numbers are kept, or
made when they are read. Results have the same bits (tests/benchmarks/gpu/test_interpreter.py).
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
    triton = getattr(interpreter, "triton", None)
    if triton is not None and triton.__version__.startswith(KNOWN):
        _make_operations_cheaper(interpreter)
    done: set[object] = set()
    kept = _Kept()

    def patch_first(function: object) -> _Kept:
        if function not in done:
            patch(function)
            done.add(function)
        return kept

    interpreter._patch_lang = patch_first


def _make_operations_cheaper(interpreter: Any) -> None:
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    _skip_dropped_assertions(interpreter.interpreter_builder)
    _unwrap_by_type(interpreter)
    _keep_numpy_types(interpreter)
    _check_no_sizes(interpreter.TensorHandle)
    _describe_tuples_late(core)
    _compare_types_by_identity(core)
    _keep_shapes_of_types(core)
    _keep_shapes_of_tensors(core)
    _broadcast_only_other_shapes(type(semantic), core)
    _keep_numbers(type(semantic), core)
    _convert_only_other_types(type(semantic), core)
    _call_directly(interpreter, semantic)


def _skip_dropped_assertions(builder: Any) -> None:
    """Do not compute the operands of assertions about overflows, which are dropped without `debug`."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _unwrap_by_type(interpreter: Any) -> None:
    """Return what is no `constexpr`, list or tuple without four comparisons."""
    core = interpreter.tl.core
    unwrap_any = core._unwrap_if_constexpr
    containers, constant = (list, tuple, core.tuple), core.constexpr
    others: set[type] = set()  # types that stay as they are

    def unwrap(value: Any) -> Any:
        kind = type(value)
        if kind in others:
            return value
        if kind is constant:
            return value.value
        if not issubclass(kind, (*containers, constant)):
            others.add(kind)
        return unwrap_any(value)

    core._unwrap_if_constexpr = interpreter.tl._unwrap_if_constexpr = unwrap


def _check_no_sizes(handle: Any) -> None:
    """Do not compare the size of each result's elements with that of its type."""

    def create(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    handle.__init__ = create


def _compare_types_by_identity(core: Any) -> None:
    """Compare types with themselves first: the interpreter has one object per type of numbers."""
    equal = core.dtype.__eq__
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


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
    """Check and describe a block's shape once, and write the name of its type when it is read."""
    create_first = core.block_type.__init__
    known: dict[tuple[int, ...], tuple[Any, int, tuple[Any, Any]]] = {}

    def create(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = tuple([size if type(size) is int else core._unwrap_if_constexpr(size) for size in sizes])
        if key not in known:
            create_first(self, element_ty, shape)
            of_tensors = core.tuple([core.constexpr(size) for size in key]), core.constexpr(self.numel)
            known[key] = self.shape, self.numel, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.of_tensors = known[key]

    def attribute(self: Any, name: str) -> str:
        if name != "name":
            raise AttributeError(name)
        self.name = f"<{self.shape}, {self.element_ty}>"
        return str(self.name)

    core.block_type.__init__, core.block_type.__getattr__ = create, attribute
    core.block_type.to_ir = lambda self, builder: self  # the interpreter's types are the language's


def _keep_shapes_of_tensors(core: Any) -> None:
    of_scalars, block = (core.tuple([]), core.constexpr(1)), core.block_type

    def create(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type = handle, type
        if type.__class__ is block:
            self.dtype, (self.shape, self.numel) = type.element_ty, type.of_tensors
        else:
            self.dtype, (self.shape, self.numel) = type.scalar, of_scalars

    core.tensor.__init__ = create


def _broadcast_only_other_shapes(semantic: Any, core: Any) -> None:
    """Leave operands of one shape as they are, and keep the blocks that numbers in a kernel become."""
    broadcast, block = semantic.broadcast_impl_value, core.block_type

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        ours, theirs = lhs.type.__class__ is block, rhs.type.__class__ is block
        if ours == theirs:
            is_same = not ours or lhs.type.shape.values == rhs.type.shape.values
            return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)
        return (lhs, spread(self, rhs, lhs)) if ours else (spread(self, lhs, rhs), rhs)

    def spread(self: Any, number: Any, like: Any) -> Any:
        blocks = number.__dict__.get("blocks")
        if blocks is None:  # not a number of the kernel's text
            return broadcast(self, number, like)[0]
        key = tuple(like.type.shape.values)
        if key not in blocks:
            blocks[key] = broadcast(self, number, like)[0]
            blocks[key].handle.data.flags.writeable = False
        return blocks[key]

    semantic.broadcast_impl_value = broadcast_others


def _keep_numbers(semantic: Any, core: Any) -> None:
    """Keep the tensors that numbers in a kernel become. Nothing may write into them."""
    make_tensor, make_constant = semantic.to_tensor, semantic.scalar_constant
    tensors: dict[tuple[type, Any], Any] = {}
    constants: dict[tuple[type, Any, str], Any] = {}

    def to_tensor(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is core.tensor:
            return x
        if kind not in (int, float, bool) or x != x:
            return make_tensor(self, x, check_type)
        key = kind, x
        if key not in tensors:
            tensors[key] = _frozen(make_tensor(self, x, check_type))
        return tensors[key]

    def scalar_constant(self: Any, value: Any, dtype: Any) -> Any:
        if type(value) not in (int, float, bool) or value != value or dtype is None:
            return make_constant(self, value, dtype)
        key = type(value), value, dtype.name
        if key not in constants:
            constants[key] = _frozen(make_constant(self, value, dtype))
        return constants[key]

    semantic.to_tensor, semantic.scalar_constant = to_tensor, scalar_constant


def _frozen(tensor: Any) -> Any:
    """Return a tensor with data that no operation can write into, and room for the blocks that it becomes."""
    tensor.handle.data.flags.writeable = False
    tensor.blocks = {}
    return tensor


def _convert_only_other_types(semantic: Any, core: Any) -> None:
    """Leave operands of one type as they are, and keep the type that operands of two types become."""
    check_any, tensor = semantic.binary_op_type_checking_impl, core.tensor
    # By what decides it, the type that each operand becomes; None: it is a tensor of that type.
    types: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def check(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        ours = lhs.dtype.name if type(lhs) is tensor else (type(lhs), lhs)
        theirs = rhs.dtype.name if type(rhs) is tensor else (type(rhs), rhs)
        key = ours, theirs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if key not in types:
            found = check_any(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
            first, second = (
                None if type(side) is tensor and side.dtype == each.dtype else each.dtype
                for side, each in zip((lhs, rhs), found, strict=True)
            )
            types[key] = first, second
            return found
        first, second = types[key]
        if first is not None:
            lhs = self.cast(lhs, first) if type(lhs) is tensor else self.scalar_constant(lhs, first)
        if second is not None:
            rhs = self.cast(rhs, second) if type(rhs) is tensor else self.scalar_constant(rhs, second)
        return self.broadcast_impl_value(lhs, rhs)

    semantic.binary_op_type_checking_impl = check


def _call_directly(interpreter: Any, semantic: Any) -> None:
    """Let a name call the language's function itself, with the interpreter's semantics."""

    def patch(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = patch
