"""What is served, how busy it is, and the one path of SageMaker.

GET /v1/models and /v1/models/{id} show the served names. GET /load tells load balancers how many requests are being
answered, in vLLM's words. POST /invocations takes a chat or a completion, told apart by their fields as in vLLM; it is
answered by that endpoint itself, errors included.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server import errors
from server.api.chat import answer_chat
from server.api.completions import answer_completion
from server.api.schemas import ChatRequest, CompletionRequest
from server.api.served import ServedModel
from server.errors import bad_request
from server.front.requests import Requests
from server.http.routes import STREAM_RESPONSE, new_router


def model_routes(model: ServedModel) -> APIRouter:
    """Return the endpoint's routes."""
    router = new_router()

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


def load_routes(num_requests: Callable[[], int]) -> APIRouter:
    """Return the endpoint's routes.

    Args:
        num_requests: requests that were accepted and have not been answered to the end.
    """
    router = new_router()

    @router.get("/load", response_model=None)
    async def show_load() -> dict[str, int]:
        """Show the load."""
        return {"server_load": num_requests()}

    return router


_Body = TypeVar("_Body", bound=BaseModel)


def invocation_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = new_router()

    @router.post("/invocations", response_model=None, responses=STREAM_RESPONSE)
    async def invoke(body: dict[str, Any], http: HttpRequest) -> Response:
        """Answer a chat or a completion."""
        if "messages" in body:
            return await answer_chat(_read(ChatRequest, body), http, model, requests)
        if "prompt" in body:
            return await answer_completion(_read(CompletionRequest, body), http, model, requests)
        raise bad_request("Send messages, as for /v1/chat/completions, or prompt, as for /v1/completions.")

    return router


def _read(kind: type[_Body], fields: dict[str, Any]) -> _Body:
    """Validate the fields as the endpoint itself would.

    Raises:
        RequestValidationError: in its form.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(found) from error
