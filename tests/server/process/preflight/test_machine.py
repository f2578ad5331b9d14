"""What the machine has, containers' limits included."""

from pathlib import Path

from server.process.preflight.memory import available_bytes, usable_cores


def test_a_containers_limits_cap_what_the_host_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable: 64 kB\n")
    assert available_bytes(meminfo, tmp_path) == 64 << 10
    for name, text in (
        ("memory.max", "9000"),
        ("memory.current", "5000"),
        ("memory.stat", "inactive_file 1000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert available_bytes(meminfo, tmp_path) == 5000
    (tmp_path / "memory.max").write_text("max")
    assert available_bytes(meminfo, tmp_path) == 64 << 10
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert usable_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("max 100000")
    assert usable_cores(tmp_path) >= 1
