"""What the processor lacks that CPU kernels are fast with, said before the start."""

import platform
import re
from pathlib import Path

_CPU_FACTS = Path("/proc/cpuinfo")
_NEEDED = {"avx2": "AVX2", "fma": "FMA"}  # by the names of /proc/cpuinfo
# As long, without both: float32 at 1 and at 128 rows, compiled for such a machine.
_COST = "kernels take 4 to 50 times as long, with --quantization int8 3 to 5 times"


def why_slow(machine: str | None = None, facts: str | None = None) -> str:
    """Say what is missing and what it costs; "" where nothing is, or where nobody can tell.

    Args:
        machine: as `platform.machine` names it. facts: what /proc/cpuinfo says.
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
