"""Read an adapter's values: the factors of linear layers at once, those of experts when a rank holds them.

Gate and up of an expert are one product of the model. If an adapter has them apart, their factors are joined: A's rows one after the
other, B with zeros for the other half.

Legend: E experts, R rank, K input features, N output features, I intermediate dim.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import AdapterFiles, FactorLayout, FileTensor, LowRank
from moe.lora.tables import Factors, factors_of
from moe.lora.targets import LayerExperts, Targets


class ExpertFactors(NamedTuple):
    """What an adapter adds to one expert."""

    up: Factors | None
    down: Factors | None


NO_FACTORS = ExpertFactors(None, None)
_ALL = -1  # expert of a product of all experts
_DOWN = ("down", "down_proj")


class LoadedAdapter:
    """An adapter's values on this rank. `experts` may be called from any thread.

    Attributes:
        linears, embeddings: Factors by the model's path of the module.
    """

    def __init__(
        self,
        files: AdapterFiles,
        targets: Targets,
        base_rows: Callable[[str], Tensor | None],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Check the adapter against the model and read everything but experts.

        Args:
            base_rows: Returns the values of an adapted module's base weight, or None if they are not known.
            dtype: Type to which factors are rounded, float32 or bfloat16.

        Raises:
            AdapterError: The adapter does not fit the model, or its file cannot be read.
        """
        self.files, self._targets, self._dtype = files, targets, dtype
        paths = targets.resolve(files)
        self._stamp = _stamp_of(files)
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], ExpertFactors] = {}
        self._of_experts: dict[str, list[LowRank]] = defaultdict(list)
        self.linears: dict[str, Factors] = {}
        self.embeddings: dict[str, Factors] = {}
        with _opened(files) as read:
            for product, path in paths.items():
                if product.layout is FactorLayout.LINEAR:
                    a_RK, b_NR = read(product.a), read(product.b)
                    self.linears[path] = factors_of(a_RK, b_NR, product.scale, dtype)
                elif product.layout is FactorLayout.EMBEDDING:
                    # A row of A's transpose per id: it is looked up, and only B is multiplied.
                    a_RV, b_NR = read(product.a), read(product.b)
                    self.embeddings[path] = factors_of(a_RV, b_NR, product.scale, dtype)
                else:
                    self._of_experts[path].append(product)
            for copy in files.base_copies:
                _check_base(copy, read(copy), base_rows)

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return self.files.digest

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        of_modules = sum(each.num_bytes for each in (*self.linears.values(), *self.embeddings.values()))
        with self._lock:
            of_experts = [each for held in self._held.values() for each in held if each is not None]
        return of_modules + sum(each.num_bytes for each in of_experts)

    def experts(self, path: str, experts: Sequence[int]) -> list[ExpertFactors]:
        """Return what the adapter adds to some experts of a layer; those that were not held are read.

        Raises:
            AdapterError: The file cannot be read, or has changed since it was checked.
        """
        if path not in self._of_experts:
            return [NO_FACTORS] * len(experts)
        with self._lock:
            missing = [each for each in dict.fromkeys(experts) if (path, each) not in self._held]
            if missing:
                self._held |= zip([(path, each) for each in missing], self._read(path, missing), strict=True)
            return [self._held[path, each] for each in experts]

    def keep_only(self, wanted: set[tuple[str, int]]) -> None:
        """Drop the factors of other (path, expert)."""
        with self._lock:
            self._held = {key: held for key, held in self._held.items() if key in wanted}

    def _read(self, path: str, experts: Sequence[int]) -> list[ExpertFactors]:
        shape, products = self._targets.experts[path], self._of_experts[path]
        if _stamp_of(self.files) != self._stamp:
            raise AdapterError(
                f"{self.files.weights} has changed since it was loaded; load it again under another name"
            )
        found: list[ExpertFactors] = []
        singles: dict[int, list[LowRank]] = defaultdict(list)
        for product in products:
            singles[product.expert].append(product)
        with _opened(self.files) as read:
            cut = {product: _cutter(product, shape, read) for product in singles.pop(_ALL, [])}
            for expert in experts:
                of_expert = {**cut, **{each: _cutter(each, shape, read) for each in singles.get(expert, ())}}
                up = [take(expert) for product, take in of_expert.items() if product.leaf not in _DOWN]
                down = [take(expert) for product, take in of_expert.items() if product.leaf in _DOWN]
                found.append(ExpertFactors(_joined(up, self._dtype), _joined(down, self._dtype)))
        return found


class _Piece(NamedTuple):
    a_RK: Tensor
    b_NR: Tensor
    scale: float


def _cutter(
    product: LowRank, shape: LayerExperts, read: Callable[[FileTensor], Tensor]
) -> Callable[[int], _Piece]:
    """Return a function that cuts an expert's part out of a product's tensors."""
    a, b, scale = read(product.a), read(product.b), product.scale
    if product.layout is FactorLayout.SINGLE:
        return lambda _expert: _Piece(a, _placed(b, product.leaf, shape), scale)
    if product.layout is FactorLayout.FUSED:
        a_ERK = a.view(shape.num_experts, product.rank, -1)
        b_NRE = b.view(-1, product.rank, shape.num_experts)
        return lambda expert: _Piece(a_ERK[expert], b_NRE[..., expert], scale)

    def stacked(expert: int) -> _Piece:
        of_a, of_b = (each[expert if len(each) > 1 else 0] for each in (a, b))
        return _Piece(of_a, _placed(of_b, product.leaf, shape), scale)

    return stacked


def _placed(b_IR: Tensor, leaf: str, shape: LayerExperts) -> Tensor:
    """Put the rows of a gate or an up projection at their places in the joint weight."""
    if leaf == "down" or not shape.has_gate:
        return b_IR
    b_NR = b_IR.new_zeros(2 * len(b_IR), b_IR.shape[1])
    if shape.is_concatenated:
        begin = 0 if leaf == "gate" else len(b_IR)
        b_NR[begin : begin + len(b_IR)] = b_IR
    else:
        b_NR[0 if leaf == "gate" else 1 :: 2] = b_IR
    return b_NR


def _joined(pieces: Sequence[_Piece], dtype: torch.dtype) -> Factors | None:
    """Join what an adapter adds to a product. If its parts have different scales, B includes them."""
    if not pieces:
        return None
    scale = pieces[0].scale
    if any(each.scale != scale for each in pieces):
        scale, pieces = 1.0, [each._replace(b_NR=each.b_NR * each.scale) for each in pieces]
    a_RK, b_NR = torch.cat([each.a_RK for each in pieces]), torch.cat([each.b_NR for each in pieces], dim=1)
    return factors_of(a_RK, b_NR, scale, dtype)


@contextmanager
def _opened(files: AdapterFiles) -> Iterator[Callable[[FileTensor], Tensor]]:
    """Open an adapter's tensors. Yields a function that reads one as float32."""

    def read(stored: FileTensor) -> Tensor:
        tensor: Tensor = tensors.get_tensor(stored.name).float()
        if tuple(tensor.shape) != stored.shape:
            raise AdapterError(f"{files.weights} has changed since it was checked")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{stored.name} holds values that are not finite")
        return tensor

    try:
        with safe_open(files.weights, framework="pt") as opened:
            tensors: Any = opened
            yield read
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{files.weights} cannot be read: {error}") from error


def _stamp_of(files: AdapterFiles) -> tuple[int, ...]:
    """Return what changes if the file is written again."""
    try:
        about = os.stat(files.weights)
    except OSError as error:
        raise AdapterError(f"{files.weights} cannot be read: {error.strerror}") from error
    return about.st_ino, about.st_size, about.st_mtime_ns


def _check_base(copy: FileTensor, values: Tensor, base_rows: Callable[[str], Tensor | None]) -> None:
    """Accept a copy of a base weight, which PEFT saves next to adapters of embeddings, only if it is the served one."""
    base = base_rows(copy.name)
    if base is None or base.shape != values.shape or not torch.equal(base, values):
        raise AdapterError(
            f"{copy.name} is another weight than the served model's; whole weights in an adapter are not supported"
        )
