"""Find the modules that answer the very rows which a layer's experts are given: its shared experts.

Whether such a module may be computed while those rows travel is seen in the rehearsal (`moe.rehearsal`), not read off a
family's fields: every module's call and every operator's reads and writes are noted on meta. A module qualifies that
- is called once per forward, with the experts' rows (the same memory, all of it) and nothing else,
- answers with new memory of the rows' shape and type, and holds no experts, nor is held by any,
- and, called after the experts, finds the rows as these did; called before them, leaves them so, and its answer is looked
  at by nobody until the experts have been called: it can then be computed later than it was called.
All others are left alone: routers, norms, experts whose rows are normalised anew (Gemma 4), inputs with weights of their own.
Rejected: names (`shared_expert`, `shared_experts`, `shared_mlp`, ...), which miss the next family and say nothing of order.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Shared(NamedTuple):
    """A module that may be computed beside a layer's experts."""

    name: str
    comes_first: bool  # the model calls it before the experts
    shape: tuple[int, ...]  # of its rows, -1 where their number stands


class _Call(NamedTuple):
    """One call of a module, from one moment to another."""

    name: str
    begun: int
    ended: int
    rows: Tensor | None  # its only argument, or an experts module's first
    answer: Any


class _Touch(NamedTuple):
    """One operator's use of some memory; views do not count."""

    moment: int
    is_write: bool


class Watch:
    """Notes the calls of a model's modules and what operators touch.

    Attributes:
        calls: in the order in which they ended.
    """

    def __init__(self, net: nn.Module, experts: Mapping[str, Any]) -> None:
        """`experts`: the experts modules, by name."""
        self._net, self._experts = net, experts
        self.calls: list[_Call] = []
        self._touches: defaultdict[int, list[_Touch]] = defaultdict(list)  # by memory
        self._kept: list[Tensor] = []  # or memory would be known by the address of what was freed
        self._now = 0
        self._begun: list[int] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs inside."""
        hooks: list[Any] = []
        try:
            for name, module in self._net.named_modules():
                hooks.append(module.register_forward_pre_hook(self._begin))
                hooks.append(module.register_forward_hook(self._end_of(name), with_kwargs=True))
            with _Operators(self._touch):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def found(self) -> dict[str, list[Shared]]:
        """Return what may be computed beside each experts module; the outermost of what lies in each other."""
        times = Counter(call.name for call in self.calls)
        once = [call for call in self.calls if times[call.name] == 1]
        return {
            call.name: [_shared(each, call) for each in _outermost(self._beside(call, once))]
            for call in once
            if call.name in self._experts
        }

    def _begin(self, _module: nn.Module, _args: Any) -> None:
        self._begun.append(self._tick())

    def _end_of(self, name: str) -> Callable[..., None]:
        def end(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            is_alone = len(args) == 1 and not kwargs
            rows = args[0] if (is_alone or name in self._experts) and args else None
            rows = rows if isinstance(rows, Tensor) else None
            self._kept += [tensor for tensor in (rows, output) if isinstance(tensor, Tensor)]
            self.calls.append(_Call(name, self._begun.pop(), self._tick(), rows, output))

        return end

    def _touch(self, tensors: list[Tensor], is_write: bool) -> None:
        self._kept += tensors
        moment = self._tick()
        for tensor in tensors:
            self._touches[_memory(tensor)].append(_Touch(moment, is_write))

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _beside(self, experts: _Call, calls: list[_Call]) -> list[_Call]:
        return [call for call in calls if _answers_the_same(call, experts) and self._may_move(call, experts)]

    def _may_move(self, call: _Call, experts: _Call) -> bool:
        """Whether a call gives the same when it is made while the experts' rows travel."""
        assert experts.rows is not None, "the same rows"
        rows, answer = _memory(experts.rows), _memory(call.answer)
        others = [each for each in self.calls if each.name in self._experts]
        if any(call.begun < each.begun and each.ended < call.ended for each in others):
            return False
        if call.begun > experts.ended:
            return not self._is_touched(rows, experts.begun, call.begun, writes_only=True)
        if call.ended < experts.begun:
            is_seen = self._is_touched(answer, call.ended, experts.begun, writes_only=False)
            return not is_seen and not self._is_touched(rows, call.begun, experts.begun, writes_only=True)
        return False

    def _is_touched(self, memory: int, begin: int, end: int, *, writes_only: bool) -> bool:
        return any(
            begin < touch.moment < end and (touch.is_write or not writes_only)
            for touch in self._touches[memory]
        )


class _Operators(TorchDispatchMode):
    """Tells of every operator but views."""

    def __init__(self, touch: Callable[[list[Tensor], bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._told = touch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it."""
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._told(tensors, func._schema.is_mutable)
        return func(*args, **(kwargs or {}))


def _answers_the_same(call: _Call, experts: _Call) -> bool:
    """Whether a call has the experts' rows alone, and answers with as many in new memory."""
    rows, given, answer = call.rows, experts.rows, call.answer
    if rows is None or given is None or not isinstance(answer, Tensor):
        return False
    is_same = (
        _memory(rows) == _memory(given)
        and rows.storage_offset() == given.storage_offset()
        and rows.numel() == given.numel()
        and rows.shape[-1] == given.shape[-1]
        and rows.is_contiguous()
        and given.is_contiguous()
    )
    is_new = _memory(answer) != _memory(rows) and answer.is_contiguous() and answer.storage_offset() == 0
    is_alike = (answer.shape, answer.dtype) == (rows.shape, rows.dtype)
    return is_same and is_new and is_alike and rows.shape[-2] * rows.shape[-1] == rows.numel()


def _outermost(calls: list[_Call]) -> list[_Call]:
    return [
        call
        for call in calls
        if not any(other.begun < call.begun and call.ended < other.ended for other in calls)
    ]


def _shared(call: _Call, experts: _Call) -> Shared:
    assert call.rows is not None, "it was found by its rows"
    *outer, _, dim = call.rows.shape
    return Shared(call.name, call.ended < experts.begun, (*outer, -1, dim))


def _memory(tensor: Tensor) -> int:
    storage: Any = tensor.untyped_storage()
    return int(storage._cdata)
