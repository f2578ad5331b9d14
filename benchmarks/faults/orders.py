"""Orders of a campaign to the processes of a service, and the disk of its KV tier.

Python imports `sitecustomize` at the start of every process of the service, which installs `benchmarks.faults.hook` there.
"""

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults.hook import UNSEEN

_NUM_DAMAGED = 64  # bytes at once
_SITE = """
from benchmarks.faults.hook import install

install({orders!r}, {log!r})
"""


class Flips(NamedTuple):
    """Records that were changed in transit."""

    num: int
    num_unseen: int  # of these, records that the service took for whole


class FaultOrders:
    """The orders of one campaign, in a folder."""

    def __init__(self, folder: Path) -> None:
        """Use a folder that exists."""
        self.disk = folder / "kv"  # for the tier on disk
        self._site, self._orders, self._log = folder / "site", folder / "orders", folder / "flips"
        self._site.mkdir()
        (self._site / "sitecustomize.py").write_text(
            _SITE.format(orders=str(self._orders), log=str(self._log))
        )
        self._log.touch()
        self._write({})

    @property
    def environment(self) -> dict[str, str]:
        """Variables for the service."""
        root = Path(__file__).parents[2]
        paths = [str(self._site), str(root), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}

    @contextmanager
    def given(self, **orders: Any) -> Iterator[None]:
        """Give orders (`benchmarks.faults.hook`), and withdraw them at the end."""
        self._write(orders)
        try:
            yield
        finally:
            self._write({})

    def _write(self, orders: dict[str, Any]) -> None:
        new = self._orders.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self._orders)  # no reader sees a part of it

    @property
    def flips(self) -> Flips:
        """The records that were changed in transit so far."""
        outcomes = self._log.read_text().splitlines()
        return Flips(len(outcomes), outcomes.count(UNSEEN))

    def damage(self, drawn: random.Random) -> None:
        """Change some bytes of the records on the disk."""
        for path in self.disk.rglob("*.kv"):
            with path.open("r+b") as file:
                size = path.stat().st_size
                for _ in range(_NUM_DAMAGED):
                    at = drawn.randrange(size // 2, size)  # the records are at the end
                    byte = os.pread(file.fileno(), 1, at)
                    os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << drawn.randrange(8)]), at)
