"""Ollama's API, for its clients: /api/chat, /api/generate, /api/tags, /api/ps, /api/show and /api/version.

Chats, and prompts with the chat template, are `ChatTurn`s as elsewhere; a raw prompt is a completion. Models are not pulled,
created, copied or unloaded: the served one stays in memory while the service runs. Requests for such actions or for
embeddings get an error with the reason. / returns the text that Ollama's clients look for in their first request.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from server.api.blocks import complete
from server.api.chat_turn import ChatTurn, MessageParser, ReasoningCount
from server.api.ollama.answer import LINES, LineChunks, LineStream, TurnDraft, loaded
from server.api.ollama.card import ModelCard
from server.api.ollama.request import (
    OWN_NAMES,
    OWN_PROMPT_NAMES,
    OllamaChat,
    OllamaPrompt,
    chat_request,
    check_fields,
    prompt_request,
    raw_request,
    served_name,
)
from server.api.openai.completions import open_completion
from server.api.parsers.deltas import PlainParser
from server.api.served import ServedModel
from server.front.errors import bad_request, named_by
from server.front.generations import Answer
from server.front.requests import Requests
from server.http.json_writer import json_response
from server.http.routes import new_ollama_router

_LINES_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, one object per line; with stream=false a single object.",
        "content": {"application/json": {}, LINES: {"schema": {"type": "string"}}},
    }
}


_NO_EMBEDDINGS = "This server does not support embeddings: its model generates text."
_ONE_MODEL = "This server serves only the model that it was started with, {name}; models are not {done} here."
_UNSERVED = {  # a method and a path -> the reason
    ("POST", "/api/embed"): _NO_EMBEDDINGS,
    ("POST", "/api/embeddings"): _NO_EMBEDDINGS,
    ("POST", "/api/pull"): _ONE_MODEL.replace("{done}", "pulled"),
    ("POST", "/api/push"): _ONE_MODEL.replace("{done}", "pushed"),
    ("POST", "/api/create"): _ONE_MODEL.replace("{done}", "created"),
    ("POST", "/api/blobs/{digest}"): _ONE_MODEL.replace("{done}", "created"),
    ("POST", "/api/copy"): _ONE_MODEL.replace("{done}", "copied"),
    ("DELETE", "/api/delete"): _ONE_MODEL.replace("{done}", "deleted"),
}


class ShowRequest(BaseModel):
    """POST /api/show."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    name: str | None = None  # older clients' key for the model
    verbose: bool | None = None


def ollama_routes(
    model: ServedModel, requests: Requests, *, version: str, is_on_gpu: bool = False
) -> APIRouter:
    """Return the endpoints' routes."""
    router, card = new_ollama_router(), ModelCard.read(model)

    @router.post("/api/chat", response_model=None, responses=_LINES_RESPONSE)
    async def ollama_chat(body: OllamaChat, http: HttpRequest) -> Response:
        """Answer a chat. Without messages, answer that the model is loaded."""
        name = served_name(body.model, model)
        if not body.messages:
            return _loaded(body, name)
        check_fields(body)
        with named_by(OWN_NAMES):
            turn = await ChatTurn.open(chat_request(body, model), model, requests, cut_to_fit=True)
        return await _answer(body, turn.answer, turn.parser(0), http, is_chat=True)

    @router.post("/api/generate", response_model=None, responses=_LINES_RESPONSE)
    async def ollama_generate(body: OllamaPrompt, http: HttpRequest) -> Response:
        """Answer a prompt. If it is empty, answer that the model is loaded."""
        name = served_name(body.model, model)
        if not body.prompt:
            return _loaded(body, name)
        check_fields(body)
        with named_by(OWN_PROMPT_NAMES):
            if body.raw:
                fields = raw_request(body, model)
                answer = await open_completion(fields, model, requests, "ollama", cut_to_fit=True)
                parser = MessageParser(PlainParser(), ReasoningCount(lambda _: 0))
            else:
                turn = await ChatTurn.open(prompt_request(body, model), model, requests, cut_to_fit=True)
                answer, parser = turn.answer, turn.parser(0)
        return await _answer(body, answer, parser, http, is_chat=False)

    _add_model_routes(router, model, card, version=version, is_on_gpu=is_on_gpu)

    @router.head("/", response_class=PlainTextResponse)
    @router.get("/", response_class=PlainTextResponse)
    async def ollama_is_running(request: HttpRequest) -> Response:
        """Return Ollama's text, which its clients request first. Redirect browsers to the dashboard."""
        if "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("dashboard", 307, headers={"Vary": "Accept"})
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})

    for (method, path), why in _UNSERVED.items():
        refuse = _refusing(why.format(name=repr(model.names[0])))
        router.add_api_route(path, refuse, methods=[method], response_model=None, include_in_schema=False)
    return router


def _add_model_routes(
    router: APIRouter, model: ServedModel, card: ModelCard, *, version: str, is_on_gpu: bool
) -> None:
    """Add the routes that describe the model and the service."""

    @router.get("/api/tags", response_model=None)
    async def ollama_tags() -> dict[str, Any]:
        """List every served name."""
        return {"models": [card.entry(name) for name in model.names]}

    @router.get("/api/ps", response_model=None)
    async def ollama_ps() -> dict[str, Any]:
        """List the models in memory: the served one, by its first name."""
        return {"models": [card.running(model.names[0], is_on_gpu=is_on_gpu)]}

    @router.post("/api/show", response_model=None)
    async def ollama_show(body: ShowRequest) -> dict[str, Any]:
        """Show the facts about a model."""
        asked = body.model or body.name
        if not asked:
            raise bad_request("model is missing.", "model")
        served_name(asked, model)
        return card.shown()

    @router.get("/api/version", response_model=None)
    async def ollama_version() -> dict[str, str]:
        """Show the service's version, not Ollama's."""
        return {"version": version}


def _refusing(why: str) -> Callable[[], Coroutine[Any, Any, Response]]:
    """Return an endpoint that refuses every request with a reason."""

    async def refuse() -> Response:
        raise bad_request(why)

    return refuse


async def _answer(
    body: OllamaChat | OllamaPrompt,
    answer: Answer,
    parser: MessageParser,
    http: HttpRequest,
    *,
    is_chat: bool,
) -> Response:
    draft = TurnDraft(body.model, answer, is_chat=is_chat)
    if body.stream is not False:
        return LineStream(answer, parser, draft)
    await complete(answer, LineChunks(parser, draft), http)
    return json_response(draft.whole)


def _loaded(body: OllamaChat | OllamaPrompt, name: str) -> Response:
    """Answer a request to load the model, which is always loaded.

    Raises:
        ApiError: 400 if the client requests to unload it.
    """
    if body.wants_unloading:
        raise bad_request(
            f"keep_alive is {body.keep_alive!r}, but {name!r} stays in memory while the service runs; leave it out.",
            "keep_alive",
        )
    return json_response(loaded(body.model, is_chat=isinstance(body, OllamaChat)))
