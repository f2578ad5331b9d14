"""GPU pages: rows are written at the step's positions, padded rows nowhere. Interpreted and compiled."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from kvcache.step import Span
from tests.fixtures import OnDevice
from tests.support.cached_codes import FORMATS, quantised, rounded
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

HEADS = LayerShape(num_kv_heads=2, key_dim=8, value_dim=6)
CODED = LayerShape(num_kv_heads=1, key_dim=12, latent=True, index_dim=10, codes=torch.int8)
LATENT = LayerShape(num_kv_heads=1, key_dim=12, value_dim=0, latent=True)


def write_step() -> list[bool]:
    """Write five tokens of one sequence and one of another, padded to eight rows. Return the checks that hold."""
    from kvcache.gpu.cache import DeviceCache, token_bytes  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    device = torch.device("cpu")
    cache = DeviceCache([HEADS, LATENT], 4, dtype=torch.float32, device=device)
    step = DeviceStep(max_tokens=8, max_sequences=2, max_blocks=2, block_tokens=BLOCK_TOKENS, device=device)
    cache.step = step
    step.fill([Span(14, 5, [3, 1]), Span(0, 1, [2])])
    step.inputs(range(6), [5])
    key, value = torch.randn(1, 2, 8, 8), torch.randn(1, 8, 2, 6).transpose(1, 2)
    latent, rope = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 4)
    returned = cache.update(key, value, 0)
    cache.update(latent, rope, 1)
    places = [(3, 14), (3, 15), (1, 0), (1, 1), (1, 2), (2, 0)]
    right = [returned[0] is key and returned[1] is value]
    for row, (block, token) in enumerate(places):
        right.append(torch.equal(cache.keys[0][block, :, token], key[0, :, row]))
        right.append(torch.equal(cache.values[0][block, :, token], value[0, :, row]))
        right.append(torch.equal(cache.keys[1][block, token], torch.cat((latent, rope), -1)[0, 0, row]))
    written = sum(int((page != 0).any(-1).sum()) for page in (cache.keys[0], cache.values[0]))
    right.append(written == 2 * 2 * len(places) and int((cache.keys[1] != 0).any(-1).sum()) == len(places))
    for layer, shape in enumerate((HEADS, LATENT)):
        right.append(len(cache.block_bytes(layer, 1)) == BLOCK_TOKENS * token_bytes(shape, torch.float32))
    right.append(token_bytes(HEADS, torch.bfloat16) == 2 * (8 + 6) * 2)
    return right


def write_coded_step() -> list[bool]:
    """Write codes of heads, latents and index keys. Return the checks that hold."""
    from kvcache.gpu.cache import DeviceCache, token_bytes  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    device, shapes = torch.device("cpu"), [replace(HEADS, codes=torch.int8), CODED]
    cache = DeviceCache(shapes, 4, dtype=torch.float32, device=device)
    step = DeviceStep(max_tokens=8, max_sequences=2, max_blocks=2, block_tokens=BLOCK_TOKENS, device=device)
    cache.step = step
    step.fill([Span(14, 5, [3, 1]), Span(0, 1, [2])])
    step.inputs(range(6), [5])
    key, value = torch.randn(1, 2, 8, 8), torch.randn(1, 8, 2, 6).transpose(1, 2)
    latent, rope, index = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 4), torch.randn(1, 8, 10)
    cache.update(key, value, 0)
    cache.update(latent, rope, 1)
    cache.update_indexer(index, 1)
    of_heads, of_latents, of_index = cache.scales[0], cache.scales[1], cache.index_scales[1]
    assert of_heads is not None and of_latents is not None and of_index is not None
    right = []
    for row, (block, token) in enumerate([(3, 14), (3, 15), (1, 0), (1, 1), (1, 2), (2, 0)]):
        at = block, slice(None), token
        stored = cache.keys[1][block, token]
        for codes, scale, wanted in (
            (cache.keys[0][at], of_heads.keys[at], key[0, :, row]),
            (cache.values[0][at], of_heads.values[at], value[0, :, row]),
            (stored[None, :8], of_latents.keys[at], latent[0, :, row]),
            (stored[None, 8:], of_latents.values[at], rope[0, :, row]),
            (cache.indexes[1][block, token][None], of_index[at], index[:, row]),
        ):
            right.append(torch.equal(codes.float() * scale[:, None], rounded(wanted, torch.int8)))
    for layer, shape in enumerate(shapes):
        right.append(len(cache.block_bytes(layer, 1)) == BLOCK_TOKENS * token_bytes(shape, torch.float32))
        right.append(all(len(part) == 4 for part in cache.parts(layer)))
    return right


def test_codes_and_scales_are_part_of_the_blocks(interpreter: RankPool) -> None:
    right = interpreter.run(write_coded_step)[0]
    assert len(right) == 34 and all(right)


def test_rows_lie_where_the_step_says_and_padding_nowhere(interpreter: RankPool) -> None:
    assert all(interpreter.run(write_step)[0])


pytestmark = needs_triton


def write(device: str, heads: int, dim: int) -> None:
    from kvcache.gpu.write import write_pages  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    rows = torch.randn(5, heads, 2 * dim)[..., :dim].to(device)
    slots = torch.tensor([33, 0, -1, 47, 16], device=device)
    pages = torch.zeros(3, heads, 16, dim, device=device)
    want = pages.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want[slot // 16, :, slot % 16] = rows[row]
    write_pages(rows, slots, pages)
    assert torch.equal(pages, want)


@pytest.mark.parametrize(("heads", "dim"), [(2, 32), (1, 88), (3, 20)])
def test_rows_go_to_their_slots_and_padding_nowhere(on_device: OnDevice, heads: int, dim: int) -> None:
    on_device(write, heads, dim)


def write_both(device: str) -> None:
    from kvcache.gpu.write import write_pages  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    keys, values = (torch.randn(4, 2, dim).to(device) for dim in (24, 16))
    slots = torch.tensor([5, -1, 40, 17], device=device)
    alone = [torch.zeros(3, 2, 16, dim, device=device) for dim in (24, 16)]
    together = [pages.clone() for pages in alone]
    write_pages(keys, slots, alone[0])
    write_pages(values, slots, alone[1])
    write_pages(keys, slots, together[0], values, together[1])
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))
    assert alone[1].any()


def test_keys_and_values_are_written_together_as_one_by_one(on_device: OnDevice) -> None:
    on_device(write_both)


def quantise(device: str, codes: torch.dtype) -> None:
    """Compare bits with the definition: rows of many sizes, zero and not finite, and one that is not stored."""
    from kvcache.gpu.write import Scales, write_pages  # noqa: PLC0415 - in the interpreter

    torch.manual_seed(0)
    keys, values = (torch.randn(9, 2, dim) for dim in (24, 16))
    keys *= torch.logspace(-36, 30, 9)[:, None, None]
    values[:, :, 3] *= 300.0
    values[2], values[3, 1, 5], values[4, 0, 0] = 0.0, float("nan"), -float("inf")
    slots = torch.tensor([5, 4, 40, 17, 33, -1, 2, 3, 1], device=device)
    pages = [torch.zeros(3, 2, 16, dim, device=device, dtype=codes) for dim in (24, 16)]
    scales = Scales(*(torch.zeros(3, 2, 16, device=device) for _ in pages))
    rows = [each.to(device) for each in (keys, values)]
    write_pages(rows[0], slots, pages[0], rows[1], pages[1], scales)
    for page, scale, row_TGD in zip(pages, scales, (keys, values), strict=True):
        is_finite = row_TGD.isfinite().all(-1, keepdim=True)
        wanted, wanted_scale = quantised(row_TGD.where(is_finite, 0.0), codes)
        wanted_scale = wanted_scale.where(is_finite, float("nan"))
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, token = divmod(slot, 16)
                assert torch.equal(page[block, :, token].float().cpu(), wanted[row].float())
                torch.testing.assert_close(
                    scale[block, :, token].cpu(), wanted_scale[row, :, 0], rtol=0, atol=0, equal_nan=True
                )
        assert int((scale != 0).sum()) == 2 * 7, "eight rows are stored, and one of them is zero"


@pytest.mark.parametrize("codes", FORMATS)
def test_rows_are_quantised_by_the_definition(on_device: OnDevice, codes: torch.dtype) -> None:
    on_device(quantise, codes)


def check_coded(codes: torch.dtype, arch: int, folder: Path) -> None:
    from kvcache.gpu import write as gpu_write  # noqa: PLC0415 - not in the interpreter
    from tests.support.gpu.triton_compile import check_budget  # noqa: PLC0415
    from tests.support.service.recorded_launch import recording  # noqa: PLC0415

    rows = torch.empty(64, 4, 128, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, 4, 16, 128, dtype=codes, device="meta")
    scales = gpu_write.Scales(*(torch.empty(9, 4, 16, device="meta") for _ in range(2)))
    slots = torch.empty(64, dtype=torch.int64, device="meta")
    with recording((gpu_write, "write_rows")) as launched:
        gpu_write.write_pages(rows, slots, pages, rows, pages, scales)
    check_budget(launched[0].kernel(64), folder, arch)


@pytest.mark.parametrize("codes", FORMATS)
def test_the_kernel_for_codes_compiles_for_sm_90_within_its_budget(
    codes: torch.dtype, tmp_path: Path
) -> None:
    check_coded(codes, 90, tmp_path)


def check_compiled(has_values: bool, arch: int, folder: Path) -> None:
    from kvcache.gpu import write as gpu_write  # noqa: PLC0415 - not in the interpreter
    from tests.support.gpu.triton_compile import check_budget  # noqa: PLC0415
    from tests.support.service.recorded_launch import recording  # noqa: PLC0415

    heads, dim = (4, 128) if has_values else (1, 576)
    rows = torch.empty(64, heads, dim, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, heads, 16, dim, dtype=torch.bfloat16, device="meta")
    values = (rows, pages) if has_values else ()
    with recording((gpu_write, "write_rows")) as launched:
        gpu_write.write_pages(rows, torch.empty(64, dtype=torch.int64, device="meta"), pages, *values)
    check_budget(launched[0].kernel(64), folder, arch)


def test_the_kernel_compiles_for_sm_90_within_its_budget(tmp_path: Path) -> None:
    check_compiled(True, 90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("has_values", [True, False])
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_launch_compiles_within_its_budget(has_values: bool, arch: int, tmp_path: Path) -> None:
    check_compiled(has_values, arch, tmp_path)
