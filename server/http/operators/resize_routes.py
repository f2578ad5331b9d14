"""POST /scale_elastic_ep: change the number of ranks while the service serves, with vLLM's fields and status endpoint.

The response is sent when the operation has ended, as in vLLM, or at once with `wait: false`. It continues if the client
disconnects. A request with the same `operation_id` waits for the same operation. `dry_run: true` only checks the number. Only `new_data_parallel_size` and
`drain_timeout` are vLLM's; unlike there, requests that are still open then continue on other ranks.
"""

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from server.front.errors import ApiError
from server.front.members.resize import DRAIN_S, Resize
from server.front.members.resize_operation import Operation, ResizePhase
from server.http.routes import new_router

MOST_RANKS = 65_536
MOST_S = 86_400.0


class ResizeForm(BaseModel):
    """A number of ranks, and how to get there."""

    model_config = ConfigDict(extra="forbid")
    new_data_parallel_size: int = Field(ge=1, le=MOST_RANKS)
    drain_timeout: float = Field(default=DRAIN_S, ge=0, le=MOST_S, allow_inf_nan=False)
    operation_id: str | None = Field(default=None, min_length=1, max_length=128)
    # None means --resize-timeout-seconds.
    timeout: float | None = Field(default=None, gt=0, le=MOST_S, allow_inf_nan=False)
    wait: bool = True
    dry_run: bool = False  # only check whether the service accepts the number


class AbortForm(BaseModel):
    """The operation to abort. None means the one that runs."""

    model_config = ConfigDict(extra="forbid")
    operation_id: str | None = None


_ABORT = AbortForm()


def resize_routes(resize: Resize) -> APIRouter:
    """Return the routes."""
    router = new_router()

    @router.post("/scale_elastic_ep", response_model=None)
    async def scale(body: ResizeForm) -> JSONResponse:
        """Change the number of ranks. Responds when they serve, or with the reason why the service is as before."""
        num_ranks, present = body.new_data_parallel_size, resize.num_ranks
        if body.dry_run or resize.repeated(num_ranks, body.operation_id) is None:
            # In a thread, because it may read the headers of a large checkpoint.
            await asyncio.to_thread(resize.check, num_ranks)
        if body.dry_run:
            return JSONResponse({"message": f"The service can have {num_ranks} ranks.", **resize.to_json()})
        operation = resize.begin(
            num_ranks,
            checked_from=present,
            drain_timeout_s=body.drain_timeout,
            timeout_s=body.timeout,
            operation_id=body.operation_id,
        )
        if body.wait:
            await resize.wait(operation)
            if operation.phase is ResizePhase.FAILED:
                raise ApiError(409 if operation.is_aborted else 500, _sentence(operation))
        state = {"message": _sentence(operation), **resize.to_json(operation)}
        return JSONResponse(state, 200 if operation.has_ended else 202)

    async def show() -> dict[str, Any]:
        """Show the newest resize: its phase, and the requested and the effective number of ranks."""
        return resize.to_json()

    # POST is vLLM's method, and GET is SGLang's.
    router.add_api_route("/is_scaling_elastic_ep", show, methods=["GET"], response_model=None)
    router.add_api_route("/is_scaling_elastic_ep", show, methods=["POST"], response_model=None)

    @router.post("/scale_elastic_ep/abort", response_model=None)
    async def abort(body: AbortForm = _ABORT) -> dict[str, Any]:
        """End the running resize, while it still prepares. The service is as before then."""
        operation = resize.abort(body.operation_id)
        await resize.wait(operation)
        return resize.to_json(operation)

    return router


def _sentence(operation: Operation) -> str:
    if operation.phase is ResizePhase.COMPLETED:
        return f"The service has {operation.wanted} ranks."
    if operation.phase is ResizePhase.FAILED:
        return f"Operation {operation.id} failed, and the service has {operation.former} ranks as before: {operation.error}."
    return f"Operation {operation.id} resizes the service to {operation.wanted} ranks."
