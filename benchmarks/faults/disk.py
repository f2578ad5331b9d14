"""The disk of a service's KV tier, which a campaign makes slow or full, and on which it damages records.

Python imports `sitecustomize` at the start of every process of the service. There it changes `kvcache.tiers.records` so that
each access to a record follows the order in a file. Rejected: a mounted file system, which needs root.
"""

import os
import random
from pathlib import Path

_NUM_DAMAGED = 64  # bytes at once
_HOOK = """
import errno, importlib.abc, importlib.util, sys, time
from pathlib import Path

NAME, DISK, ORDER = "kvcache.tiers.records", {disk!r}, Path({order!r})

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            transfer = module.RecordStore._transfer
            def follow(store, call, buffers, place):
                order = ORDER.read_text() if store.name.startswith(DISK) else ""
                if order == "full" and call is module.os.pwritev:
                    raise OSError(errno.ENOSPC, "No space left on device")
                time.sleep(float(order) if order and order != "full" else 0.0)
                return transfer(store, call, buffers, place)
            module.RecordStore._transfer = follow
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


class FaultyDisk:
    """A folder for a tier on disk, and its faults."""

    def __init__(self, folder: Path) -> None:
        """Use a folder that exists."""
        self.folder = folder / "kv"
        self._hook, self._order = folder / "hook", folder / "order"
        self._hook.mkdir()
        (self._hook / "sitecustomize.py").write_text(
            _HOOK.format(disk=str(self.folder), order=str(self._order))
        )
        self.repair()

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the service."""
        paths = [str(self._hook), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    def slow_down(self, seconds: float) -> None:
        """Let each access to a record take longer."""
        self._order.write_text(f"{seconds}")

    def fill(self) -> None:
        """Let each write fail, as on a full disk."""
        self._order.write_text("full")

    def repair(self) -> None:
        """End the fault."""
        self._order.write_text("")

    def damage(self, drawn: random.Random) -> None:
        """Change some bytes of the records."""
        for path in self.folder.glob("*.kv"):
            with path.open("r+b") as file:
                size = path.stat().st_size
                for _ in range(_NUM_DAMAGED):
                    at = drawn.randrange(size // 2, size)  # the records are at the end
                    byte = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << drawn.randrange(8)]), at)
