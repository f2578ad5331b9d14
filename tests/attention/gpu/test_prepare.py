"""One launch for norms of heads, rotary embedding and the cache write, against the separate steps. Interpreted and compiled."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.fixtures import OnDevice
from tests.support.cached_codes import FORMATS, quantised
from tests.support.gpu.attention import some_fast
from tests.support.gpu.interpreted import needs_triton

pytestmark = needs_triton
ROWS, EPS = 6, 1e-5
SLOTS = [33, 0, -1, 47, 16, 5]


class Case(NamedTuple):
    """Heads, and how they are changed."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    rotary_dim: int = 16
    kind: str = "halves"
    is_normed: bool = True
    has_gaps: bool = True


CASES = {
    "normed, halves": Case(),
    "not normed, half angles": Case(kind="half angles", is_normed=False),
    "part of a head": Case(heads=5, kv_heads=3, dim=24, value_dim=20, rotary_dim=8),
    "sorted pairs": Case(kind="sorted", has_gaps=False),
    "neighbours, many heads": Case(heads=130, kv_heads=65, dim=12, value_dim=4, rotary_dim=12, kind="neighbours"),
}  # fmt: skip


def rotation_of(kind: str) -> Any:
    from attention.gpu.rotary import Rotation  # noqa: PLC0415 - in the interpreter

    return {
        "halves": Rotation(),
        "half angles": Rotation(has_half_angles=True),
        "sorted": Rotation(is_interleaved=True, is_sorted=True),
        "neighbours": Rotation(is_interleaved=True),
    }[kind]


def angles_of(kind: str, rotary_dim: int, device: str) -> Any:
    """Return angles with gaps between columns, as gpt-oss computes them."""
    from attention.gpu.prepare import Angles  # noqa: PLC0415 - in the interpreter

    angle = torch.randn(rotary_dim // 2, ROWS)
    angles_TA = (angle if kind == "half angles" else torch.cat((angle, angle))).T
    return Angles(angles_TA.cos().to(device), angles_TA.sin().to(device), rotation_of(kind))


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x_THD: Tensor, angles: Any) -> Tensor:
    from moe.adopt.rotary import turned as turn  # noqa: PLC0415 - in the interpreter

    x = x_THD.transpose(0, 1)[None]
    out, _ = turn(x, x, angles.cosines_TA[None], angles.sines_TA[None], rotation=angles.rotation)
    return out[0].transpose(0, 1)


def prepare_heads(device: str, case: Case) -> None:
    from attention.gpu.prepare import HeadNorm, prepare  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    sizes = (case.heads * case.dim, case.kv_heads * case.dim, case.kv_heads * case.value_dim)
    packed = torch.randn(ROWS, sum(sizes), device=device)
    parts = packed.split(sizes, dim=-1)
    query, key, value = parts if case.has_gaps else (part.contiguous() for part in parts)
    query, key = query.unflatten(-1, (-1, case.dim)), key.unflatten(-1, (-1, case.dim))
    value = value.unflatten(-1, (-1, case.value_dim))
    weights = torch.randn(2, case.dim, device=device)
    angles = angles_of(case.kind, case.rotary_dim, device)
    norms = [HeadNorm(weight, EPS) if case.is_normed else None for weight in weights]
    want_query, want_key = (
        turned(normed(x, weight) if case.is_normed else x, angles)
        for x, weight in zip((query, key), weights, strict=True)
    )
    key_before, value_before = key.clone(), value.clone()
    pages = [
        torch.full((3, case.kv_heads, 16, dim), 7.0, device=device) for dim in (case.dim, case.value_dim)
    ]
    want_pages = [each.clone() for each in pages]
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            want_pages[0][slot // 16, :, slot % 16] = want_key[row]
            want_pages[1][slot // 16, :, slot % 16] = value[row]
    prepare(
        query, key, value, angles, torch.tensor(SLOTS, device=device), *pages, query_norm=norms[0], key_norm=norms[1]
    )  # fmt: skip
    torch.testing.assert_close(query, want_query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pages[0], want_pages[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(pages[1], want_pages[1])
    assert torch.equal(key, key_before) and torch.equal(value, value_before)


def prepare_codes(device: str, codes: torch.dtype, case: Case) -> None:
    """Compare bits with rows that are prepared for pages without codes, and quantised by the definition."""
    from attention.gpu.prepare import HeadNorm, prepare  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.write import Scales  # noqa: PLC0415

    torch.manual_seed(0)
    sizes = (case.heads * case.dim, case.kv_heads * case.dim, case.kv_heads * case.value_dim)
    packed, angles = (
        torch.randn(ROWS, sum(sizes), device=device),
        angles_of(case.kind, case.rotary_dim, device),
    )
    norm = HeadNorm(torch.randn(case.dim, device=device), EPS)
    slots, dims = torch.tensor(SLOTS, device=device), (case.dim, case.value_dim)

    def run(pages: list[Tensor], scales: Any) -> Tensor:
        parts = packed.clone().split(sizes, dim=-1)
        query, key = (part.unflatten(-1, (-1, case.dim)) for part in parts[:2])
        value = parts[2].unflatten(-1, (-1, case.value_dim))
        prepare(query, key, value, angles, slots, *pages, query_norm=norm, key_norm=norm, scales=scales)
        changed: Tensor = query.clone()
        return changed

    plain = [torch.zeros(3, case.kv_heads, 16, dim, device=device) for dim in dims]
    coded = [torch.zeros(page.shape, dtype=codes, device=device) for page in plain]
    scales = Scales(*(torch.full((3, case.kv_heads, 16), 7.0, device=device) for _ in dims))
    assert torch.equal(run(plain, None), run(coded, scales))
    for page, code, scale in zip(plain, coded, scales, strict=True):
        wanted, wanted_scale = quantised(page, codes)
        assert torch.equal(code.float(), wanted.float())
        for slot in (slot for slot in SLOTS if slot >= 0):
            at = slot // 16, slice(None), slot % 16
            assert torch.equal(scale[at], wanted_scale[..., 0][at])
        assert int((scale != 7.0).sum()) == 5 * case.kv_heads, "padded rows must not be written"


@pytest.mark.parametrize("codes", FORMATS)
@pytest.mark.parametrize("case", some_fast(CASES, "part of a head"))
def test_codes_are_written_after_the_norm_and_rotation(
    on_device: OnDevice, codes: torch.dtype, case: Case
) -> None:
    on_device(prepare_codes, codes, case)


@pytest.mark.parametrize("case", some_fast(CASES, "normed, halves", "not normed, half angles"))
def test_queries_keys_and_values_are_prepared_as_by_separate_steps(on_device: OnDevice, case: Case) -> None:
    on_device(prepare_heads, case)


def prepare_rows_of_latents(device: str, kind: str) -> None:
    from attention.gpu.prepare import HeadNorm, prepare_latents  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    heads, unrotated, rotary, latent = 5, 6, 8, 12
    packed = torch.randn(ROWS, heads * (unrotated + rotary) + latent + rotary, device=device)
    query, both = packed.split((heads * (unrotated + rotary), latent + rotary), dim=-1)
    query = query.unflatten(-1, (heads, -1))
    weight, angles = torch.randn(latent, device=device), angles_of(kind, rotary, device)
    want_query = torch.cat((query[..., :unrotated], turned(query[..., unrotated:], angles)), -1)
    rows = torch.cat((normed(both[:, :latent], weight), turned(both[:, None, latent:], angles)[:, 0]), -1)
    pages = torch.full((3, 16, latent + rotary), 7.0, device=device)
    want_pages = pages.clone()
    for row, slot in enumerate(SLOTS):
        if slot >= 0:
            want_pages[slot // 16, slot % 16] = rows[row]
    slots = torch.tensor(SLOTS, device=device)
    prepare_latents(query, both, HeadNorm(weight, EPS), angles, slots, pages)
    torch.testing.assert_close(query, want_query, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pages, want_pages, atol=1e-5, rtol=1e-5)


def prepare_codes_of_latents(device: str, codes: torch.dtype) -> None:
    """Compare bits with rows that are prepared for pages without codes, and quantised by the definition."""
    from attention.gpu.prepare import HeadNorm, prepare_latents  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.write import Scales  # noqa: PLC0415

    torch.manual_seed(0)
    heads, unrotated, rotary, latent = 5, 6, 8, 12
    packed = torch.randn(ROWS, heads * (unrotated + rotary) + latent + rotary, device=device)
    norm, angles = HeadNorm(torch.randn(latent, device=device), EPS), angles_of("sorted", rotary, device)
    slots = torch.tensor(SLOTS, device=device)

    def run(pages: Tensor, scales: Any) -> Tensor:
        query, both = packed.clone().split((heads * (unrotated + rotary), latent + rotary), dim=-1)
        query = query.unflatten(-1, (heads, -1))
        prepare_latents(query, both, norm, angles, slots, pages, scales)
        changed: Tensor = query.clone()
        return changed

    plain = torch.zeros(3, 16, latent + rotary, device=device)
    coded = torch.zeros(plain.shape, dtype=codes, device=device)
    scales = Scales(*(torch.zeros(3, 1, 16, device=device) for _ in range(2)))
    assert torch.equal(run(plain, None), run(coded, scales))
    for dims, scale in ((slice(0, latent), scales.keys), (slice(latent, None), scales.values)):
        wanted, wanted_scale = quantised(plain[..., dims], codes)
        assert torch.equal(coded[..., dims].float(), wanted.float())
        assert torch.equal(scale[:, 0], wanted_scale[..., 0])


@pytest.mark.parametrize("codes", FORMATS)
def test_codes_of_latents_are_written_after_the_norm_and_rotation(
    on_device: OnDevice, codes: torch.dtype
) -> None:
    on_device(prepare_codes_of_latents, codes)


@pytest.mark.parametrize("kind", ["sorted", pytest.param("halves", marks=pytest.mark.slow)])
def test_queries_and_latents_are_prepared_as_by_separate_steps(on_device: OnDevice, kind: str) -> None:
    on_device(prepare_rows_of_latents, kind)


def refuse(device: str) -> None:
    from attention.gpu.prepare import prepare  # noqa: PLC0415 - in the interpreter

    rows, pages = torch.zeros(ROWS, 1, 16, device=device), torch.zeros(1, 1, 16, 16, device=device)
    slots = torch.zeros(ROWS, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="have 32 dims; the number must be even and at most 16"):
        prepare(rows, rows, rows, angles_of("halves", 32, device), slots, pages, pages)


def test_angles_wider_than_a_head_are_refused(on_device: OnDevice) -> None:
    on_device(refuse)


META = torch.device("meta")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def launch_heads(heads: int, kv_heads: int, dim: int, kind: str, *, is_normed: bool) -> None:
    from attention.gpu.prepare import Angles, HeadNorm, prepare  # noqa: PLC0415 - not in the interpreter

    packed = meta(64, (heads + 2 * kv_heads) * dim).split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in packed)
    columns = dim // 2 if kind == "half angles" else dim
    norm = HeadNorm(meta(dim), EPS) if is_normed else None
    angles = Angles(meta(64, columns), meta(64, columns), rotation_of(kind))
    pages, slots = meta(9, kv_heads, 16, dim), meta(64, dtype=torch.int64)
    prepare(query, key, value, angles, slots, pages, pages, query_norm=norm, key_norm=norm)


def launch_latents() -> None:
    from attention.gpu.prepare import Angles, HeadNorm, prepare_latents  # noqa: PLC0415 - not in the interpreter

    angles = Angles(meta(64, 64), meta(64, 64), rotation_of("sorted"))
    slots = meta(64, dtype=torch.int64)
    prepare_latents(
        meta(64, 128, 192), meta(64, 2112)[:, 1536:], HeadNorm(meta(512), EPS), angles, slots, meta(9, 16, 576)
    )  # fmt: skip


COMPILED: dict[str, tuple[Any, ...]] = {
    "qwen3": (32, 4, 128, "halves"),
    "gpt-oss": (64, 8, 64, "half angles"),
    "ernie": (20, 4, 128, "neighbours"),
}


def check_compiled(name: str, arch: int, folder: Path) -> None:
    from attention.gpu import prepare as kernels  # noqa: PLC0415 - not in the interpreter
    from tests.support.gpu.triton_compile import check_budget  # noqa: PLC0415
    from tests.support.service.recorded_launch import recording  # noqa: PLC0415

    with recording((kernels, "prepare_heads"), (kernels, "prepare_latent_rows")) as launched:
        if name == "deepseek":
            launch_latents()
        else:
            launch_heads(*COMPILED[name], is_normed=name == "qwen3")
    check_budget(launched[0].kernel(80), folder, arch)


def test_the_kernel_compiles_for_sm_90_within_its_budget(tmp_path: Path) -> None:
    check_compiled("qwen3", 90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMPILED, "deepseek"])
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_launch_compiles_within_its_budget(name: str, arch: int, tmp_path: Path) -> None:
    check_compiled(name, arch, tmp_path)
