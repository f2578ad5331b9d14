"""A trainer's torch.distributed group, as the front sees it: a process that joins it and writes what it receives.

See `server.serve.weight_receiver`, which the front starts and to which it writes orders.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.front.errors import ApiError
from server.front.helper_processes import kill_helper, start_helper

_ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-P", str(_ROOT / "__main__.py"), "weight-receiver")


class WeightGroup:
    """The group, once a client has named one."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Whether the group is there."""
        return self._process is not None and self._process.returncode is None

    async def join(self, *, address: str, port: int, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a group of the trainer. Returns when all members are there.

        Raises:
            ApiError: The trainer did not come in time, or a group is open already.
        """
        if self.is_open:
            raise ApiError(409, "A group is open already: close it with POST /destroy_weights_update_group.")
        self._process = await start_helper(self._command)
        place = {"address": address, "port": port, "rank": rank, "world_size": world_size}
        await self._order({"join": {**place, "timeout_s": timeout_s}}, timeout_s)

    async def receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        folder: Path,
        timeout_s: float,
    ) -> None:
        """Receive tensors that the group's rank 0 broadcasts in this order, and write them to a new folder.

        Raises:
            ApiError: No group is open, or it broke.
        """
        if not self.is_open:
            raise ApiError(
                409, "No group is open: send POST /init_weights_update_group, while the trainer joins it."
            )
        what = {"names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes]}
        await self._order({"receive": {**what, "source": 0, "folder": str(folder)}}, timeout_s)

    async def close(self) -> None:
        """Leave the group. May be called twice."""
        process, self._process = self._process, None
        await kill_helper(process)

    async def _order(self, order: dict[str, Any], timeout_s: float) -> None:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None, (
            "it has pipes"
        )
        failure = "its process ended"
        async with self._turn:
            try:
                async with asyncio.timeout(timeout_s):
                    process.stdin.write(json.dumps(order).encode() + b"\n")
                    await process.stdin.drain()
                    if line := await process.stdout.readline():
                        failure = json.loads(line).get("failure", "")
            except TimeoutError:
                failure = f"the trainer did not answer within {timeout_s:g} s"
            except OSError:
                pass  # the process has ended
        if failure:
            await self.close()
            raise ApiError(400, f"The group of the trainer failed and was closed: {failure}.")
