"""The checksum of a record on a GPU is that of torch's operations, bit for bit. Interpreted and compiled."""

from pathlib import Path

import pytest
import torch

from kvcache.unit import block_parts, sum_of
from tests.fixtures import OnDevice
from tests.kvcache.test_unit import filled_cache
from tests.support.gpu.interpreted import needs_triton

pytestmark = needs_triton


def sum_sizes(device: str) -> None:
    """Compare the sums of random records of many sizes, and check that one changed bit changes the sum."""
    from kvcache.gpu.sums import BLOCK, sum_record  # noqa: PLC0415 - in the interpreter

    generator = torch.Generator().manual_seed(3)
    for num_words in (1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 100):
        record = torch.randint(256, (4 * num_words,), generator=generator, dtype=torch.uint8)
        record[-1] = 255  # the highest bit of the last word
        on_device = record.to(device)
        expected = sum_of([record])
        assert sum_record(on_device) == expected
        assert 0 <= expected < 1 << 64
        on_device[4 * (num_words // 2)] ^= 16
        assert sum_record(on_device) != expected


def test_records_of_any_size_have_the_sum_of_the_definition(on_device: OnDevice) -> None:
    on_device(sum_sizes)


def export_blocks(device: str) -> None:
    """Compare a unit on the device, if it is a GPU, with torch's operations, also for a record that it takes."""
    from kvcache.gpu import unit as gpu_unit  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.sums import sum_record  # noqa: PLC0415

    parts = [part.to(device) for part in block_parts(filled_cache("device")) if part.numel()]
    unit = gpu_unit.DeviceUnit(parts)
    unit._sum = sum_record
    views, checksum = unit.export(1)
    assert checksum == sum_of([part[1].contiguous() for part in parts])
    [buffer] = unit.buffers(2)
    buffer[:] = bytes(views[0])
    assert unit.take(2) == checksum
    assert sum_of([part[2].contiguous() for part in parts]) == checksum


def test_a_unit_s_records_have_the_sum_of_the_definition(on_device: OnDevice) -> None:
    on_device(export_blocks)


def check_compiled(arch: int, folder: Path) -> None:
    from kvcache.gpu import sums  # noqa: PLC0415 - not in the interpreter
    from tests.support.gpu.triton_compile import check_budget  # noqa: PLC0415
    from tests.support.service.recorded_launch import recording  # noqa: PLC0415

    with recording((sums, "sum_words")) as launched, pytest.raises(RuntimeError, match="meta"):
        sums.sum_record(torch.empty(1 << 20, dtype=torch.uint8, device="meta"))
    check_budget(launched[0].kernel(64), folder, arch)


def test_the_kernel_compiles_for_sm_90_within_its_budget(tmp_path: Path) -> None:
    check_compiled(90, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 89, 90, 100])
def test_every_launch_compiles_within_its_budget(arch: int, tmp_path: Path) -> None:
    check_compiled(arch, tmp_path)
