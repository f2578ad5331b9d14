"""The weights of a checkpoint. Quantised ones are assembled from several tensors.

A quantised weight has codes, scales and perhaps more under separate names: `W` and `W_scale_inv` of FP8, `W_packed`,
`W_scale` and `W_zero_point` of compressed-tensors, `qweight`, `qzeros` and `scales` of AWQ and GPTQ, `W_blocks` and
`W_scales` of gpt-oss. Here they are one, with the name and shape of the plain weight, so that the load plan
matches names and shapes as for any checkpoint. The tensors show which weights are quantised, and with which parts; the
configuration lists the formats. Contradictions are found from the headers, before anything is read.
Codes, scales and other parts are read separately, per row, because all go through the same conversions. Everything
except codes is checked when it is read, which may be long before the codes are.
"""

from collections import Counter, defaultdict
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moe.load import layouts
from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.load.layouts import UNREAD, CodeLayout, part_of
from moe.load.quantisation import Quantisation, WeightFormat
from moe.load.quantised_weight import CODE_TYPES, Kind, QuantisedWeight, QuantisedWeightError, check_scales

FLOATS, POWERS, SMALL = ("F32", "BF16", "F16"), ("U8", "F8_E8M0"), ("F8_E4M3",)
UNSERVED = ("F8_", "F6_", "F4", "U8", "I8", "U16", "I16", "U32", "I32")  # prefixes of safetensors' dtypes
LISTED = 8
_KINDS: dict[str, Kind] = {
    "fp8": "e4m3", "mxfp8": "e4m3", "int8": "int8", "nvfp4": "e2m1", "mxfp4": "e2m1", "int4": "int4",
}  # fmt: skip
_SCALES = {
    "fp8": FLOATS + POWERS[1:],
    "mxfp8": POWERS,
    "int8": FLOATS,
    "nvfp4": SMALL,
    "mxfp4": POWERS,
    "int4": FLOATS,
}


class Composition(NamedTuple):
    """Properties that merged weights must have in common."""

    kind: Kind
    scale: torch.dtype
    format: WeightFormat
    parts: tuple[str, ...]  # fields of a `QuantisedWeight`


class _Stored(NamedTuple):
    """Tensors of a quantised weight."""

    names: dict[str, str]  # by part
    layout: CodeLayout
    format: WeightFormat
    shape: tuple[int, ...]
    is_shown_turned: bool = False  # for modules that keep [..., K, N]
    num_parts: int = 1  # parts of rows with their own blocks


class StoredTensors:
    """Weights of a checkpoint by name."""

    def __init__(self, checkpoint: Checkpoint, quantisation: Quantisation | None) -> None:
        """Match codes and scales.

        Raises:
            CheckpointError: Scales without weights, weights without scales, shapes that do not match, or quantised tensors
                that the configuration does not describe; the message lists them.
        """
        self.directory: Path = checkpoint.directory
        self.quantisation = quantisation
        self._checkpoint = checkpoint
        self._names = set(checkpoint.names())
        self._stored: dict[str, _Stored] = {}
        self._turned: dict[str, _Stored] = {}  # alternative layout of fused experts
        self._checked: dict[tuple[str, str, int | None], Tensor] = {}  # checked scales that were not read yet
        if quantisation is not None:
            self._match(quantisation)
        self._refuse_the_rest()

    def names(self) -> list[str]:
        """Return all weights, in no particular order."""
        return [*self._names]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, or of the plain weight if it is quantised."""
        if name not in self._stored:
            return self._checkpoint.shape(name)
        stored = self._stored[name]
        *lead, n, k = stored.shape
        return (*lead, k, n) if stored.is_shown_turned else stored.shape

    def num_bytes(self, name: str, row: int | None = None) -> int:
        """Return the bytes of a weight in the file, all parts included: whole, or one row of the first dimension."""
        stored = self._stored.get(name)
        names = [name] if stored is None else list(stored.names.values())
        whole = sum(map(self._checkpoint.num_bytes, names))
        return whole if row is None else whole // self.shape(name)[0]

    def settle(self, name: str, wanted: tuple[int, ...], *, is_transposed: bool) -> None:
        """Choose the layout of a quantised weight of fused experts by the shape that their module expects.

        If types and shapes allow both, the module's layout is chosen. Afterwards `shape` returns the module's shape.
        """
        *lead, a, b = wanted
        natural = (*lead, b, a) if is_transposed else wanted
        found = [self._stored[name], *([self._turned[name]] if name in self._turned else [])]
        fitting = [each for each in found if each.shape == natural]
        chosen = (fitting or found)[-1 if is_transposed else 0]
        self._stored[name] = chosen._replace(is_shown_turned=is_transposed)

    def is_quantised(self, name: str) -> bool:
        """Return whether a weight is quantised."""
        return name in self._stored

    def composition(self, name: str) -> Composition:
        """Return the composition of a quantised weight."""
        stored = self._stored[name]
        kind = _KINDS[stored.format.name]
        parts = ["codes", "scales"]
        if "factor" in stored.names or "divisor" in stored.names:
            parts.append("row_scales")
        if stored.format.has_zeros:
            parts.append("zeros")
        return Composition(kind, self._scale_type(stored), stored.format, tuple(parts))

    def _scale_type(self, stored: _Stored) -> torch.dtype:
        if stored.format.name in ("mxfp4", "mxfp8"):
            return torch.uint8
        if stored.format.name == "nvfp4":
            return torch.float8_e4m3fn
        seen = self._checkpoint.dtype(stored.names["scales"])
        if stored.format.block_rows > 1:
            return torch.float32
        return {"BF16": torch.bfloat16, "F16": torch.float16}.get(seen, torch.float32)

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read a plain weight, or one row of it (kept as a dimension of 1). float16 becomes float32."""
        tensor = self._read(name, row)
        return tensor.to(torch.float32) if tensor.dtype is torch.float16 else tensor

    def _read(self, name: str, row: int | None) -> Tensor:
        return self._checkpoint.read(name) if row is None else self._checkpoint.read_row(name, row)

    def check_scales(self, name: str, row: int | None = None) -> None:
        """Read and check everything of a quantised weight except its codes, which may be read much later.

        The next `read_part` of scales returns the checked ones.

        Raises:
            QuantisedWeightError: No kernel can compute with them.
        """
        stored = self._stored[name]
        self._check_order(name, stored)
        found = {"scales": self._scales(stored, row)}
        of_expert = "" if row is None else f" of expert {row}"
        first, kind = f"{stored.names['scales']}{of_expert}", self._scale_type(stored)
        second = stored.names.get("factor") or stored.names.get("divisor")
        if second is None:
            check_scales(found["scales"].view(kind), first)
        else:
            found["row_scales"] = self._row_scales(stored, row)
            scales, row_scales = (_per_row(stored, *each) for each in found.items())
            check_scales(scales.view(kind), first, row_scales.squeeze(-1), f"{second}{of_expert}")
        self._checked |= {(name, part, row): tensor for part, tensor in found.items()}

    def read_part(self, name: str, part: str, row: int | None = None) -> Tensor:
        """Read one part of `composition` of a quantised weight, per row.

        Returns:
            codes: bytes [..., N, K or K / 2] uint8. scales: [..., N, B], small floats as bytes. zeros: [..., N, B] uint8.
            row_scales: [..., N, 1] float32.

        Raises:
            QuantisedWeightError: No kernel can compute with the scales.
        """
        stored = self._stored[name]
        if part == "codes":
            return stored.layout.codes(self._read(stored.names["codes"], row))
        if part == "zeros":
            return self._zeros(stored, row)
        if (name, part, row) not in self._checked:
            self.check_scales(name, row)
        return _per_row(stored, part, self._checked.pop((name, part, row)))

    def _scales(self, stored: _Stored, row: int | None) -> Tensor:
        """Return the scales as stored, not repeated: [..., R, B], R being 1, N or the number of blocks of rows."""
        scales, dtype = self._read_scalar_or_row(stored.names["scales"], row), self._scale_type(stored)
        scales = scales.view(torch.uint8) if dtype.itemsize == 1 else scales.to(dtype)
        lead, n = self._lead(stored, row), stored.shape[-2]
        rows, block = stored.format.block_rows, stored.format.block
        if stored.layout.is_turned and not (block == 0 and rows == 0):
            scales = scales.transpose(-1, -2)
        if block == 0:
            return scales.reshape(*lead, -1, 1)
        return scales.reshape(*lead, _num_row_blocks(stored.format, n, stored.num_parts), -1)

    def _row_scales(self, stored: _Stored, row: int | None) -> Tensor:
        """Return one second scale, or gate's and up's: [..., 1 or 2, 1]."""
        factor = "factor" in stored.names
        seen = self._read_scalar_or_row(stored.names["factor" if factor else "divisor"], row).float()
        lead = self._lead(stored, row)
        seen = seen.reshape(()).expand(lead) if seen.numel() == 1 else seen
        return (seen if factor else 1 / seen).reshape(*lead, -1, 1)

    def _zeros(self, stored: _Stored, row: int | None) -> Tensor:
        assert stored.layout.zeros is not None and self.quantisation is not None
        zeros = stored.layout.zeros(self._read(stored.names["zeros"], row))
        # GPTQ's own reader adds within four bits: a stored -1 means 0.
        return (zeros + self.quantisation.zeros_above) & 15

    def _lead(self, stored: _Stored, row: int | None) -> tuple[int, ...]:
        return stored.shape[:-2] if row is None else (1,)

    def _read_scalar_or_row(self, name: str, row: int | None) -> Tensor:
        """Read one expert's part of a tensor, or the whole if all experts share it."""
        is_one = row is not None and (
            not self._checkpoint.shape(name) or self._checkpoint.shape(name)[0] == 1
        )
        return self._read(name, None if is_one else row)

    def _check_order(self, name: str, stored: _Stored) -> None:
        """Check that inputs are in the order of their blocks.

        Raises:
            QuantisedWeightError: They are not (GPTQ with desc_act), or eight-bit zeros are not 128.
        """
        if "order" in stored.names:
            order, block = self._read(stored.names["order"], None), stored.format.block or stored.shape[-1]
            if not torch.equal(order.long(), torch.arange(len(order)) // block):
                raise QuantisedWeightError(
                    f"{stored.names['order']} reorders inputs (desc_act, actorder: group), which is not supported: "
                    f"quantise without it"
                )
        if stored.layout is layouts.GPTQ_BYTES and "zeros" in stored.names:
            assert self.quantisation is not None and stored.layout.zeros is not None
            zeros = (
                stored.layout.zeros(self._read(stored.names["zeros"], None)) + self.quantisation.zeros_above
            )
            if bool((zeros != 128).any()):
                raise QuantisedWeightError(
                    f"{name} has eight bits and zeros that are not 128; only symmetric weights (sym = true) are supported"
                )

    def quantised(self, name: str, composition: Composition, parts: dict[str, Tensor]) -> QuantisedWeight:
        """Combine converted parts into one weight.

        Raises:
            QuantisedWeightError: No kernel can compute with their values, or they were converted differently.
        """
        codes, row_scales = parts["codes"].view(CODE_TYPES[composition.kind]), parts.get("row_scales")
        weight = QuantisedWeight(
            codes=codes, kind=composition.kind, scales=parts["scales"].view(composition.scale), block=composition.format.block or 1,
            row_scales=None if row_scales is None else row_scales.squeeze(-1), zeros=parts.get("zeros"),
            fp8_rows=composition.format.fp8_rows,
        )  # fmt: skip
        if not composition.format.block:
            weight = weight.under(weight.in_dim)
        weight.check(name)
        return weight

    def _match(self, quantisation: Quantisation) -> None:
        parts = self._collect(quantisation)
        problems = []
        for name, names in sorted(parts.items()):
            problem = self._why_not(name, names, quantisation)
            self._names -= set(names.values())
            self._names.add(name)
            if problem:
                problems.append(problem)
        problems += [
            f"{name} is FP8 and has no {name}{'_scale_inv' if quantisation.method == 'fp8' else '_scale'}"
            for name in self._names
            if name not in parts and self._checkpoint.dtype(name) == "F8_E4M3"
        ]
        self._refuse(problems)

    def _collect(self, quantisation: Quantisation) -> dict[str, dict[str, str]]:
        """Return tensors of quantised weights by weight and part. Removes unread tensors from the names."""
        self._names = {name for name in self._names if not name.endswith(UNREAD)}
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._names:
            weight, part = part_of(name, quantisation.method, self._is_small)
            if part:
                found[weight][part] = name
        for weight, names in found.items():
            if "codes" not in names and weight in self._names:
                names["codes"] = weight
        return found

    def _is_small(self, name: str) -> bool:
        return name in self._names and self._checkpoint.dtype(name).startswith(UNSERVED)

    def _why_not(self, name: str, names: dict[str, str], quantisation: Quantisation) -> str | None:
        """Find a weight's layout and format; return the problem if there is none."""
        if quantisation.method == "mxfp4":
            problem = self._why_no_blocks(names, name)
            if problem:
                return problem
        if "codes" not in names:
            return f"{next(iter(names.values()))} has no matching {name}"
        codes = names["codes"]
        if "scales" not in names:
            return f"{codes} has no matching {name}_scale"
        dtype, scales = self._checkpoint.dtype(codes), names["scales"]
        layout = self._layout(codes, scales, quantisation)
        if layout is None:
            wanted = "F8_E4M3" if quantisation.method == "fp8" else f"a type of {quantisation.names}"
            return f"{codes} has scales and is {dtype}, not {wanted}"
        if quantisation.method == "fp8" and quantisation.leaves_plain(name.rpartition(".")[0]):
            return f"{codes} is FP8, but modules_to_not_convert lists its module"
        raw = self._checkpoint.shape(codes)
        if len(raw) < 2:
            return f"{codes} has {len(raw)} dimensions; a quantised weight must have 2 or 3"
        shape = layout.shape(raw)
        return self._choose(name, names, layout, shape, quantisation)

    def _choose(
        self,
        name: str,
        names: dict[str, str],
        layout: CodeLayout,
        shape: tuple[int, ...],
        quantisation: Quantisation,
    ) -> str | None:
        """Choose the first of the configuration's formats that matches types and shapes; return the problem if none does."""
        codes, scales = names["codes"], names["scales"]
        seen, dtype = self._checkpoint.shape(scales), self._checkpoint.dtype(scales)
        of_kind = [each for each in quantisation.formats if _KINDS[each.name] == layout.kind]
        could = [each for each in of_kind if dtype in _SCALES[each.name]]
        if of_kind and dtype not in {known for each in of_kind for known in _SCALES[each.name]}:
            return f"{scales} is {dtype}, not one of {', '.join(_SCALES[of_kind[0].name])}"
        if not could:
            return f"{codes} is {layout.dtype} with scales of {dtype}, a format that quantization_config does not name"
        turned = layouts.TURNED.get(layout) if len(shape) == 3 else None
        second = names.get("factor") or names.get("divisor")
        if second is None and "nvfp4" in {each.name for each in could}:
            return f"{codes} has no second scale (weight_scale_2, weight_global_scale)"
        count = 1 if second is None else prod(self._checkpoint.shape(second))
        if count not in _second_counts(shape):
            return f"{second} has {count} values; {codes} needs one per matrix, or one each for gate and up"
        parts = quantisation.parts_of(name)
        for each in could:
            if seen in _scale_shapes(each, shape, is_turned=layout.is_turned, num_parts=parts):
                self._stored.setdefault(name, _Stored(names, layout, each, shape, num_parts=parts))
            if turned is not None:
                other = turned.shape(self._checkpoint.shape(codes))
                if seen in _scale_shapes(each, other, is_turned=True):
                    self._turned.setdefault(name, _Stored(names, turned, each, other))
        if name not in self._stored and name in self._turned:
            self._stored[name] = self._turned.pop(name)
        if name in self._stored:
            return self._why_no_zeros(names, self._stored[name])
        fitting = _scale_shapes(could[0], shape, is_turned=layout.is_turned, num_parts=parts)
        wanted = [list(each) for each in fitting]
        return f"{scales} is {list(seen)}; {codes} {list(self._checkpoint.shape(codes))} needs {wanted[0]}"

    def _why_no_zeros(self, names: dict[str, str], stored: _Stored) -> str | None:
        layout, chosen, shape = stored.layout, stored.format, stored.shape
        if not chosen.has_zeros:
            return None
        if "zeros" not in names:
            return f"{names['codes']} has no matching zeros (weight_zero_point, qzeros)"
        seen, blocks = self._checkpoint.shape(names["zeros"]), -(-shape[-1] // (chosen.block or shape[-1]))
        wanted = (blocks, shape[-2] // 8) if layout.is_turned else (shape[-2] // 8, blocks)
        if shape[-2] % 8 or seen != wanted or self._checkpoint.dtype(names["zeros"]) != "I32":
            return f"{names['zeros']} is {list(seen)}; {names['codes']} needs {list(wanted)} of type I32"
        return None

    def _layout(self, codes: str, scales: str, quantisation: Quantisation) -> CodeLayout | None:
        dtype, names = self._checkpoint.dtype(codes), [each.name for each in quantisation.formats]
        if quantisation.method == "mxfp4":
            return layouts.BLOCKS
        if dtype == "I32":
            if quantisation.method == "awq":
                return layouts.AWQ
            if quantisation.method == "gptq":
                return layouts.GPTQ if "int4" in names else layouts.GPTQ_BYTES
            return layouts.WORDS if "int4" in names else layouts.WORDS_OF_BYTES
        if dtype == "I8":
            powers = self._checkpoint.dtype(scales) in POWERS
            return layouts.SIGNED_PAIRS if powers else layouts.INTEGERS
        return {"F8_E4M3": layouts.BYTES, "U8": layouts.PAIRS}.get(dtype)

    def _why_no_blocks(self, names: dict[str, str], name: str) -> str | None:
        if "codes" not in names:
            return f"{names['scales']} has no matching blocks"
        if "scales" not in names:
            return f"{names['codes']} has no matching {name}_scales"
        codes, scales = names["codes"], names["scales"]
        kinds = [self._checkpoint.dtype(each) for each in (codes, scales)]
        if kinds != ["U8", "U8"]:
            return f"{codes} and {scales} are {' and '.join(kinds)}, not U8"
        shape = self._checkpoint.shape(codes)
        if len(shape) != 4 or shape[3] != 16:
            return f"{codes} is {list(shape)}; MXFP4 blocks must be [experts, outputs, blocks, 16]"
        return None

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
            f"{self.directory} has quantised tensors ({listed}) that its config.json does not explain "
            f"(quant_method: {method}): use a checkpoint in bfloat16, float16 or float32, or a complete quantised one"
        )


def _per_row(stored: _Stored, part: str, seen: Tensor) -> Tensor:
    """Repeat scales, or second scales, for every output of their block."""
    n = stored.shape[-2]
    rows = (stored.format.block_rows or n) if part == "scales" else n // seen.shape[-2]
    if part == "scales" and stored.num_parts > 1 and rows > 1:
        parts = seen.repeat_interleave(rows, dim=-2).chunk(stored.num_parts, dim=-2)
        return torch.cat([part[..., : n // stored.num_parts, :] for part in parts], dim=-2)
    return (seen if rows == 1 else seen.repeat_interleave(rows, dim=-2)[..., :n, :]).contiguous()


def _second_counts(shape: tuple[int, ...]) -> tuple[int, ...]:
    experts = prod(shape[:-2])
    return (1, experts, 2 * experts) if len(shape) == 3 else (1,)


def _num_row_blocks(form: WeightFormat, num_rows: int, num_parts: int) -> int:
    """Return the number of blocks of rows. Each part begins with a new block."""
    return num_parts * -(-(num_rows // num_parts) // form.block_rows)


def _scale_shapes(
    form: WeightFormat, shape: tuple[int, ...], *, is_turned: bool, num_parts: int = 1
) -> list[tuple[int, ...]]:
    """Return the allowed shapes of a format's scales for a weight; the first is the usual one."""
    *lead, n, k = shape
    if form.block == 0 and form.block_rows == 0:
        return [tuple(lead), (*lead, 1), (*lead, 1, 1), (), (1,)]
    rows, blocks = _num_row_blocks(form, n, num_parts), -(-k // (form.block or k))
    if is_turned:
        return [(*lead, blocks, rows)]
    return [(*lead, rows, blocks), (*lead, rows, 1, blocks, 1), *([] if form.block else [(*lead, n)])]
