"""POST /invocations: SageMaker's one path for everything; a chat and a completion are told apart by their fields.

vLLM has it with the same rule. What is asked for is answered by that endpoint itself, errors included.
"""

from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.chat import answer_chat
from server.api.completions import answer_completion
from server.api.schemas import ChatRequest, CompletionRequest
from server.errors import bad_request
from server.front.requests import Requests
from server.front.served import ServedModel
from server.http.described import STREAM_RESPONSE

_Body = TypeVar("_Body", bound=BaseModel)


def invocation_routes(model: ServedModel, requests: Requests) -> APIRouter:
    """Return the endpoint's routes."""
    router = APIRouter()

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
