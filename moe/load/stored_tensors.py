"""The weights of a checkpoint, quantised ones put together from the tensors that hold them.

A quantised weight is two tensors in a file: `W` and `W_scale_inv` for FP8, `W_blocks` and `W_scales` for MXFP4. Here
they are one, under the name and the shape that the weight would have, so that the load plan matches names and shapes
as it does for any checkpoint. What does not go together is found from the headers, before anything is read.
Codes and scales are read separately, scales per row, because both are put through the same conversions.
"""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.load.quantisation import Quantisation
from moe.load.quantised_weight import CODE_TYPES, Kind, QuantisedWeight

FP8_CODES, FP8_SCALES = "F8_E4M3", ("F32", "BF16", "F16", "F8_E8M0")
UNSERVED = ("F8_", "F6_", "F4", "U8", "I8", "U16", "I16", "U32", "I32")  # beginnings of safetensors' dtypes
LISTED = 8


class _Stored(NamedTuple):
    """A quantised weight's two tensors."""

    codes: str
    scales: str


class StoredTensors:
    """A checkpoint's weights by name."""

    def __init__(self, checkpoint: Checkpoint, quantisation: Quantisation | None) -> None:
        """Match codes and scales.

        Raises:
            CheckpointError: listing scales without weights, weights without scales, shapes that do not go together,
                and quantised tensors that the configuration does not speak of.
        """
        self.directory: Path = checkpoint.directory
        self.quantisation = quantisation
        self._checkpoint = checkpoint
        self._names = set(checkpoint.names())
        self._stored: dict[str, _Stored] = {}
        if quantisation is not None and quantisation.method == "fp8":
            self._match_fp8(quantisation)
        elif quantisation is not None:
            self._match_mxfp4()
        self._refuse_the_rest()

    def names(self) -> list[str]:
        """All weights, in no particular order."""
        return [*self._names]

    def shape(self, name: str) -> tuple[int, ...]:
        """A weight's shape: as if it were not quantised."""
        shape = self._checkpoint.shape(self._stored[name].codes if name in self._stored else name)
        if (
            self.is_quantised(name) and self._is_mxfp4
        ):  # [E, N, blocks, 16] of what gpt-oss keeps as [E, K, N]
            experts, n, blocks, size = shape
            return experts, blocks * size * 2, n
        return shape

    def is_quantised(self, name: str) -> bool:
        """Whether a weight is codes and scales."""
        return name in self._stored

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a plain weight, whole or one row of the first dimension (kept as a dimension of 1)."""
        return self._checkpoint.read(name) if row is None else self._checkpoint.read_row(name, row)

    def read_codes(self, name: str, row: int | None = None) -> Tensor:
        """Read a quantised weight's codes as bytes: [..., N, K], or [..., N, K / 2] for MXFP4, uint8."""
        codes = self.read(self._stored[name].codes, row)
        return codes.flatten(-2) if self._is_mxfp4 else codes.view(torch.uint8)

    def read_scales(self, name: str, row: int | None = None) -> Tensor:
        """Read a quantised weight's scales per row: [..., N, blocks of K], float32, or uint8 for MXFP4."""
        assert self.quantisation is not None, f"{name} is not quantised"
        scales = self.read(self._stored[name].scales, row)
        if self._is_mxfp4:
            return scales
        n = self.shape(name)[-2]
        return scales.float().repeat_interleave(self.quantisation.block_rows, dim=-2)[..., :n, :].contiguous()

    def quantised(self, name: str, codes: Tensor, scales: Tensor) -> QuantisedWeight:
        """Put converted codes and scales together.

        Raises:
            QuantisedWeightError: they hold what no kernel computes, or were not converted alike.
        """
        assert self.quantisation is not None, f"{name} is not quantised"
        kind: Kind = "e2m1" if self._is_mxfp4 else "e4m3"
        weight = QuantisedWeight(
            codes=codes.view(CODE_TYPES[kind]), kind=kind, scales=scales, block=self.quantisation.block
        )
        weight.check(name)
        return weight

    @property
    def _is_mxfp4(self) -> bool:
        return self.quantisation is not None and self.quantisation.method == "mxfp4"

    def _match_fp8(self, quantisation: Quantisation) -> None:
        problems = []
        for scales in [name for name in self._names if name.endswith("_scale_inv")]:
            self._names.discard(scales)
            codes = scales.removesuffix("_scale_inv")
            problem = self._why_no_fp8(codes, scales, quantisation)
            if problem:
                problems.append(problem)
            self._stored[codes] = _Stored(codes, scales)
        problems += [
            f"{name} is FP8 and has no {name}_scale_inv"
            for name in self._names
            if self._checkpoint.dtype(name) == FP8_CODES and name not in self._stored
        ]
        self._refuse(problems)

    def _why_no_fp8(self, codes: str, scales: str, quantisation: Quantisation) -> str | None:
        if codes not in self._names:
            return f"{scales} has no {codes} beside it"
        if self._checkpoint.dtype(codes) != FP8_CODES:
            return f"{codes} has scales and is {self._checkpoint.dtype(codes)}, not {FP8_CODES}"
        if self._checkpoint.dtype(scales) not in FP8_SCALES:
            return f"{scales} is {self._checkpoint.dtype(scales)}, not one of {', '.join(FP8_SCALES)}"
        if quantisation.leaves_plain(codes.rpartition(".")[0]):
            return f"{codes} is FP8, and modules_to_not_convert says that it is not"
        shape = self._checkpoint.shape(codes)
        if len(shape) < 2:
            return f"{codes} has {len(shape)} dimensions; a quantised weight has 2 or 3"
        *lead, n, k = shape
        wanted = [*lead, -(-n // quantisation.block_rows), -(-k // quantisation.block)]
        seen = list(self._checkpoint.shape(scales))
        return None if seen == wanted else f"{scales} is {seen}; {codes} {list(shape)} takes {wanted}"

    def _match_mxfp4(self) -> None:
        problems = []
        for codes in [name for name in self._names if name.endswith("_blocks")]:
            name = codes.removesuffix("_blocks")
            scales = f"{name}_scales"
            problem = self._why_no_mxfp4(codes, scales)
            if problem:
                problems.append(problem)
            self._names -= {codes, scales}
            self._names.add(name)
            self._stored[name] = _Stored(codes, scales)
        problems += [f"{name} has no blocks beside it" for name in self._names if name.endswith("_scales")]
        self._refuse(problems)

    def _why_no_mxfp4(self, codes: str, scales: str) -> str | None:
        if scales not in self._names:
            return f"{codes} has no {scales} beside it"
        kinds = [self._checkpoint.dtype(name) for name in (codes, scales)]
        if kinds != ["U8", "U8"]:
            return f"{codes} and {scales} are {' and '.join(kinds)}, not U8"
        shape, seen = self._checkpoint.shape(codes), self._checkpoint.shape(scales)
        if len(shape) != 4 or shape[3] != 16:
            return f"{codes} is {list(shape)}; MXFP4 blocks are [experts, outputs, blocks, 16]"
        return None if seen == shape[:3] else f"{scales} is {list(seen)}; {codes} takes {list(shape[:3])}"

    def _refuse(self, problems: list[str]) -> None:
        if problems:
            shown = "\n  ".join(sorted(problems)[:LISTED])
            rest = f"\n  and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise CheckpointError(
                f"{self.directory} has quantised weights that cannot be read:\n  {shown}{rest}"
            )

    def _refuse_the_rest(self) -> None:
        plain = [name for name in self._names if name not in self._stored]
        found = Counter(self._checkpoint.dtype(name) for name in plain)
        bad = [dtype for dtype in found if dtype.startswith(UNSERVED)]
        if not bad:
            return
        listed = ", ".join(f"{found[dtype]} of type {dtype}" for dtype in bad)
        method = self.quantisation.method if self.quantisation else "none"
        raise CheckpointError(
            f"{self.directory} holds quantised tensors ({listed}) that its config.json does not explain "
            f"(quant_method: {method}): give a checkpoint in bfloat16, float16 or float32, or a complete one in FP8 "
            f"or MXFP4"
        )
