"""POST /ranks/drain: move a rank's requests to the other ranks, for example before maintenance of its node.

The response is sent when the rank has no requests left, or at the timeout, with the number of remaining ones. The drain continues
after a timeout, and if the client disconnects. GET /v1/fault_tolerance/status lists draining ranks.
"""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from server.front import errors
from server.front.routing.moves import Moves
from server.http.routes import new_router

MAX_DRAIN_S = 86_400.0  # of one wait
DRAIN_S = 300.0  # of one wait, by default


class DrainForm(BaseModel):
    """A rank to drain."""

    model_config = ConfigDict(extra="forbid")
    rank: int = Field(ge=0)
    undo: bool = False  # let it take requests again
    timeout_s: float = Field(default=DRAIN_S, ge=0, le=MAX_DRAIN_S)  # 0 answers at once


def rank_routes(moves: Moves, why_not_ready: Callable[[], str | None]) -> APIRouter:
    """Return the route.

    Args:
        why_not_ready: Returns None while some rank serves, and otherwise the reason.
    """
    router = new_router()

    async def drain(body: DrainForm) -> dict[str, Any]:
        """Drain a rank, or undo a drain. Responds when the rank has no requests left, or at the timeout."""
        if (reason := why_not_ready()) is not None:
            raise errors.not_ready(reason)
        if body.undo:
            moves.undo(body.rank)
        else:
            moves.drain(body.rank)
            await moves.wait(body.rank, body.timeout_s)
        found = next((each for each in moves.drains() if each.rank == body.rank), None)
        if found is None:
            return {"rank": body.rank, "draining": False}
        return {"rank": found.rank, "draining": True, "requests": found.num_requests}

    router.add_api_route("/ranks/drain", drain, methods=["POST"], response_model=None)
    return router
