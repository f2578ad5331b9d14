"""Warn before the start if the processor lacks the instructions that make CPU kernels fast."""

import platform
import re
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")
_NEEDED = {"avx2": "AVX2", "fma": "FMA"}  # flags in /proc/cpuinfo and their names
# Measured without both, for float32 at 1 and at 128 rows, compiled for such a machine.
_COST = "kernels take 4 to 50 times as long (3 to 5 times with --quantization int8)"


def why_slow(machine: str | None = None, facts: str | None = None) -> str:
    """Return the missing instructions and their cost, or "" if none is known to be missing.

    Args:
        machine: Name as from `platform.machine`. facts: Content of /proc/cpuinfo.
    """
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return ""
    if facts is None:
        facts = _CPU_FACTS.read_text() if _CPU_FACTS.exists() else ""
    found = re.search(r"^flags\s*:(.*)$", facts, re.MULTILINE)
    flags = set(found[1].split()) if found else set(_NEEDED)
    missing = [name for flag, name in _NEEDED.items() if flag not in flags]
    if not missing:
        return ""
    return f"this processor has no {' and no '.join(missing)}; {_COST}"
