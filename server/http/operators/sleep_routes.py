"""Sleep mode: POST /sleep, POST /wake_up and GET /is_sleeping as vLLM has them, and SGLang's names for the same.

vLLM's /sleep?level=1&mode=abort and /wake_up?tags=weights&tags=kv_cache take the same parameters here; `timeout_s` is WideEP's.
SGLang's /release_memory_occupation and /resume_memory_occupation take `tags` in the body, and refuse while requests are open.
"""

from collections.abc import Callable, Collection
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field

from server.front.errors import ApiError
from server.front.sleep_mode import CACHE_LEVEL, EXPERTS_LEVEL, TAGS, WEIGHTS, SleepMode, SleepWay
from server.http.routes import new_router

SLEEP_S = 300.0  # of one call, by default
MAX_SLEEP_S = 86_400.0
Tag = Literal["weights", "kv_cache"]
Level = Annotated[int, Query(ge=CACHE_LEVEL, le=EXPERTS_LEVEL)]
Timeout = Annotated[float, Query(ge=0, le=MAX_SLEEP_S, allow_inf_nan=False)]


class MemoryForm(BaseModel):
    """Parts of the memory, in SGLang's format. None means all."""

    tags: list[Tag | Literal["cuda_graph"]] | None = Field(default=None, fail_fast=True)

    @property
    def parts(self) -> Collection[str]:
        """The parts that exist here: there are no CUDA graphs without a GPU."""
        return TAGS if self.tags is None else TAGS & {*self.tags}


_ALL = MemoryForm()


def sleep_routes(sleep_mode: SleepMode, num_open: Callable[[], int]) -> APIRouter:
    """Return the routes.

    Args:
        num_open: Returns the number of open requests.
    """
    router = new_router()

    def state() -> dict[str, Any]:
        level, is_waking, _ = sleep_mode.state
        return {"is_sleeping": level > 0, "level": level, "is_waking": is_waking}

    @router.get("/is_sleeping", response_model=None)
    async def is_sleeping() -> dict[str, Any]:
        """Show whether the service sleeps. It refuses requests then, also while it falls asleep or wakes up."""
        return state()

    @router.post("/sleep", response_model=None)
    async def sleep(
        level: Level = CACHE_LEVEL, mode: SleepWay = SleepWay.ABORT, timeout_s: Timeout = SLEEP_S
    ) -> dict[str, Any]:
        """Free the memory of idle ranks: of the KV cache (level 1), or of experts too (level 2).

        `mode` decides about open requests: abort ends them, wait waits for their ends, keep continues them after waking.
        """
        await sleep_mode.sleep(level, mode, timeout_s)
        return state()

    @router.post("/wake_up", response_model=None)
    async def wake_up(
        tags: Annotated[list[Tag] | None, Query()] = None, timeout_s: Timeout = SLEEP_S
    ) -> dict[str, Any]:
        """Bring back the memory, or the parts in `tags`. Requests are accepted again when no part is missing."""
        await sleep_mode.wake_up(tags or TAGS, timeout_s)
        return state()

    @router.post("/release_memory_occupation", response_model=None)
    async def release_memory_occupation(body: MemoryForm = _ALL) -> dict[str, Any]:
        """Free the memory of idle ranks, by SGLang's name: the KV cache, and experts too if the tags include weights."""
        if not body.parts:
            return state()
        if not sleep_mode.state.level and (count := num_open()):
            raise ApiError(
                409,
                f"{count} requests are open. Wait for their ends, or use POST /sleep?mode=wait, abort or keep.",
            )
        level = EXPERTS_LEVEL if WEIGHTS in body.parts else CACHE_LEVEL
        await sleep_mode.sleep(level, SleepWay.WAIT, SLEEP_S)
        return state()

    @router.post("/resume_memory_occupation", response_model=None)
    async def resume_memory_occupation(body: MemoryForm = _ALL) -> dict[str, Any]:
        """Bring back the memory, by SGLang's name."""
        await sleep_mode.wake_up(body.parts, SLEEP_S)
        return state()

    return router
