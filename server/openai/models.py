"""GET /v1/models and /v1/models/{id}: the served names."""

from typing import Any

from fastapi import APIRouter

from server import errors
from server.request_life.served import ServedModel


def model_routes(model: ServedModel) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

    @router.get("/v1/models", response_model=None)
    async def list_models() -> dict[str, Any]:
        """List every served name."""
        return {"object": "list", "data": [_card(model, name) for name in model.names]}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def show_model(name: str) -> dict[str, Any]:
        """Show one."""
        if name not in model.names:
            raise errors.not_served(name, model.names)
        return _card(model, name)

    return router


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "wideep",
        "root": model.names[0],
        "parent": None,
        "max_model_len": model.max_len(),
    }
