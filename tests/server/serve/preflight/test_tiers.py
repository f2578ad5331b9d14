"""The tiers of the KV cache are refused at a start if they do not fit: with their sizes, and before anything is written."""

import os
from pathlib import Path

import pytest

from kvcache.tiers import remote_memory
from scheduler.policy.config import EngineSettings
from server.serve.preflight import tiers
from server.serve.preflight.kv_share import cpu_cache_bytes
from server.serve.preflight.memory import total_bytes
from server.serve.preflight.tiers import check_tiers, note_on_hand_over, with_hand_over
from tests.support.service.starts import complaint_of, options_for

GIB = 1 << 30


def check(at: Path, *, host: int = 0, disk: int = 0, ranks: int = 0, free: int = 8 * GIB) -> None:
    """Check tiers of these sizes, with `at`/kv as the folder."""
    engine = EngineSettings(
        kv_offloading_bytes=host,
        kv_offloading_dir=str(at / "kv") if disk else None,
        kv_offloading_disk_bytes=disk,
    )
    check_tiers(engine, ranks_bytes=ranks, free_bytes=free)


def free_is(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(tiers, "free_at", lambda _path: num_bytes)


def test_tiers_that_fit_exactly_are_accepted_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_is(monkeypatch, 5 * GIB)
    check(tmp_path, host=5 * GIB, ranks=3 * GIB, disk=5 * GIB)
    assert list(tmp_path.iterdir()) == []


def test_a_tier_beyond_the_free_memory_is_refused_with_what_the_ranks_take(
    tmp_path: Path,
) -> None:
    said = complaint_of(lambda: check(tmp_path, host=5 * GIB + 1, ranks=3 * GIB))
    assert "--kv-offloading-size is 5.0 GiB, but 5.0 GiB of host memory is free after the 3.0 GiB" in said
    said = complaint_of(lambda: check(tmp_path, host=9 * GIB, ranks=0))
    assert "but 8.0 GiB of host memory is free; give a smaller size" in said
    assert "but 0.0 GiB of host memory" in complaint_of(lambda: check(tmp_path, host=1, ranks=9 * GIB))


def test_a_tier_beyond_the_disk_is_refused_but_its_own_files_count_as_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_is(monkeypatch, 2 * GIB)
    said = complaint_of(lambda: check(tmp_path, disk=3 * GIB))
    assert (
        f"--kv-offloading-disk-size is 3.0 GiB, but the disk of {tmp_path}/kv has 2.0 GiB free; give" in said
    )
    kept = tmp_path / "kv" / "model" / "00" / "block"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(os.urandom(1 << 20))
    check(tmp_path, disk=2 * GIB + (1 << 19))
    said = complaint_of(lambda: check(tmp_path, disk=3 * GIB))
    assert "has 2.0 GiB free besides the 0.0 GiB in the folder" in said


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: Path(path) != tmp_path)  # root may write everywhere
    said = complaint_of(lambda: check(tmp_path, disk=1))
    assert f"--kv-offloading-dir is '{tmp_path}/kv', but {tmp_path} cannot be written" in said


def test_free_bytes_are_those_of_the_file_system(tmp_path: Path) -> None:
    found = os.statvfs(tmp_path)
    assert abs(tiers.free_at(tmp_path) - found.f_frsize * found.f_bavail) < GIB


def test_the_default_kv_cache_is_a_share_of_what_the_tier_leaves(tmp_path: Path) -> None:
    def default_of(*flags: str) -> int:
        options = options_for(tmp_path, *flags)
        return cpu_cache_bytes(options, free_bytes=12 * GIB, num_local_ranks=2, spare_bytes=GIB // 4)

    assert default_of() == 12 * GIB // 8 - GIB // 4
    assert default_of("--kv-offloading-size=4") == 8 * GIB // 8 - GIB // 4


@pytest.mark.parametrize("flag", ["--pools=prefill:1,decode:1", "--role=decode"])
def test_pools_that_hand_requests_over_get_a_share_of_the_machine_s_memory(tmp_path: Path, flag: str) -> None:
    asked = options_for(tmp_path, flag)
    options = with_hand_over(asked, machine_bytes=40 * GIB)
    assert options.engine.kv_offloading_bytes == 4 * GIB
    note = note_on_hand_over(asked, options)
    assert note and "4.0 GiB" in note and "10% of this machine's by default (--kv-offloading-size)" in note


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--pools=both:1,both:1",),
        ("--pool=replica-2",),
        ("--pools=prefill:1,decode:1", "--kv-offloading-size=2"),
    ],
)
def test_other_services_keep_the_tiers_that_they_were_given(tmp_path: Path, flags: tuple[str, ...]) -> None:
    asked = options_for(tmp_path, *flags)
    options = with_hand_over(asked, machine_bytes=40 * GIB)
    assert options == asked and note_on_hand_over(asked, options) is None


def test_the_machine_s_memory_is_that_of_the_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 4096 kB\nMemAvailable: 100 kB\n")
    assert total_bytes(meminfo, tmp_path) == 4 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(meminfo, tmp_path) == 4 << 20
    (tmp_path / "memory.max").write_text("1048576\n")
    assert total_bytes(meminfo, tmp_path) == 1 << 20


def test_nixl_is_refused_if_it_is_missing_or_has_no_memory_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "PACKAGES", ("no_such_package",))
    for engine, message in (
        (EngineSettings(kv_transfer_backend="nixl"), "give its size with --kv-offloading-size"),
        (EngineSettings(kv_transfer_backend="nixl", kv_offloading_bytes=GIB), "pip install nixl"),
    ):
        assert message in complaint_of(lambda e=engine: check_tiers(e, ranks_bytes=0, free_bytes=8 * GIB))  # type: ignore[misc]
