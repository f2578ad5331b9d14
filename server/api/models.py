"""GET /v1/models and /v1/models/{id}: the served names."""

from typing import Any

from fastapi import APIRouter

from server import errors
from server.front.served import ServedModel


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
        "permission": [_permission(name, model.created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """What OpenAI's cards had until 2023, and some clients still read; vLLM has it with these values."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
