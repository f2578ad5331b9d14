"""/v1/responses: create, retrieve, delete and cancel responses, and count a prompt's tokens."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.api.answer_json import chat_logprobs
from server.api.blocks import DraftChunks, complete
from server.api.chat_turn import ChatTurn
from server.api.openai.responses.answer import ResponseDraft, ResponseStream
from server.api.openai.responses.kept import BackgroundRun, BackgroundRuns, FollowedRun, ResponseStore
from server.api.openai.responses.left_runs import LeftRun, LeftRuns
from server.api.openai.responses.request import (
    OWN_NAMES,
    ResponsesRequest,
    chat_request,
    items_to_messages,
    messages_of,
    refuse_unserved_responses,
)
from server.api.openai.responses.text_logprobs import TextLogprobs
from server.api.schemas import ChatMessage
from server.api.served import ServedModel
from server.api.streaming import json_answer
from server.api.tokenize import count_tokens
from server.front.errors import ApiError, bad_request, named_by
from server.front.requests import Requests
from server.http.exchanges import acting_for, owner_of_exchange
from server.http.json_writer import LONG_CHARS, is_larger, json_response
from server.http.routes import STREAM_RESPONSE, new_router

_RETRY_S = 0.1  # while the service is not ready


class _Parts(NamedTuple):
    """The objects that the endpoint uses."""

    model: ServedModel
    requests: Requests
    store: ResponseStore
    runs: BackgroundRuns
    new_id: Callable[[], str]
    left: LeftRuns | None


def new_response_id() -> str:
    """Return an id for a response."""
    return f"resp_{uuid.uuid4().hex}"


def responses_routes(
    model: ServedModel,
    requests: Requests,
    are_several: Callable[[], bool] = lambda: False,
    new_id: Callable[[], str] = new_response_id,
    left: LeftRuns | None = None,
    store: ResponseStore | None = None,
) -> APIRouter:
    """Return the endpoint's routes.

    Args:
        are_several: Returns whether several API keys share the stored responses.
        new_id: Returns an id for a response. Of several fronts, each chooses ids that name it.
        left: Files of background runs, for a front that replaces this one; None keeps none.
        store: Keeps the responses; None makes one.
    """
    router = new_router()
    runs = BackgroundRuns(are_several=are_several)
    parts = _Parts(model, requests, store or ResponseStore(), runs, new_id, left)
    parts.store.on_dropped = runs.forget
    if left is not None:
        left.run_again = lambda run: _run_again(run, left, parts)

    @router.post("/v1/responses", response_model=None, responses=STREAM_RESPONSE)
    async def create_response(body: ResponsesRequest, http: HttpRequest) -> Response:
        """Create a response, now or in the background, and store it unless store is false."""
        return await _create(body, http, parts)

    @router.post("/v1/responses/input_tokens", response_model=None)
    async def count_input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        """Count the prompt tokens of a request without running it."""
        model.check_name(body.model)
        refuse_unserved_responses(body)
        with named_by(OWN_NAMES):
            num_tokens = await count_tokens(chat_request(body, _history(body, parts.store)), model)
        return {"object": "response.input_tokens", "input_tokens": num_tokens}

    @router.get("/v1/responses/{response_id}", response_model=None, responses=STREAM_RESPONSE)
    async def retrieve_response(
        response_id: str, stream: bool = False, starting_after: int | None = None
    ) -> Response:
        """Return a stored response, or stream the events of a background response."""
        stored = parts.store.get(response_id, owner_of_exchange(), "response_id")
        if not stream:
            return await _shown(stored.response, model)
        return parts.runs.follow(response_id, -1 if starting_after is None else max(-1, starting_after))

    @router.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(response_id: str) -> dict[str, Any]:
        """Delete a stored response, and cancel it if it is still running."""
        parts.store.delete(response_id, owner_of_exchange())
        await parts.runs.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @router.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel_response(response_id: str) -> Response:
        """Cancel a background response."""
        return await _cancel(response_id, parts)

    return router


async def _create(body: ResponsesRequest, http: HttpRequest, parts: _Parts) -> Response:
    name = parts.model.check_name(body.model)
    refuse_unserved_responses(body)
    room = parts.runs.room(owner_of_exchange()) if body.background else contextlib.nullcontext()
    with room:
        return await _create_in(body, name, http, parts)


async def _create_in(body: ResponsesRequest, name: str, http: HttpRequest, parts: _Parts) -> Response:
    owner, history = owner_of_exchange(), _history(body, parts.store)
    request_id = parts.new_id()
    with named_by(OWN_NAMES):
        turn = await ChatTurn.open(
            chat_request(body, history), parts.model, parts.requests, request_id=request_id, cut_to_fit=True
        )
    draft = _draft(body, name, turn)
    if body.background:
        run = await _start(body, turn, draft, history, owner, parts)
        return FollowedRun(run, 0) if body.stream else json_response(draft.response)
    chunks = DraftChunks(
        turn.parser(0), draft, on_end=lambda: _keep(body, draft, history, owner, parts.store)
    )
    if body.stream:
        return ResponseStream(turn.answer, chunks, draft, parts.model)
    await complete(turn.answer, chunks, http)
    return await _shown(draft.response, parts.model)


async def _shown(response: dict[str, Any], model: ServedModel) -> Response:
    """Return a response's JSON. If it is long, a thread encodes it."""
    present = dict(response)  # a background run may change it meanwhile
    return await json_answer(lambda: present, model, is_long=is_larger(present, LONG_CHARS))


def _keep(
    body: ResponsesRequest, draft: ResponseDraft, history: list[ChatMessage], owner: str, store: ResponseStore
) -> None:
    if body.store is not False:
        store.put(draft.response, [*history, *items_to_messages(draft.response["output"])], owner)


async def _start(
    body: ResponsesRequest,
    turn: ChatTurn,
    draft: ResponseDraft,
    history: list[ChatMessage],
    owner: str,
    parts: _Parts,
) -> BackgroundRun:
    """Start a background run, and keep it for a front that replaces this one."""
    response_id, store, left = draft.response["id"], parts.store, parts.left

    def keep() -> None:
        if store.has(response_id):  # it may have been deleted in the meantime
            _keep(body, draft, history, owner, store)

    # The conversation is kept in the step that completes the response, so that clients can continue it at once.
    chunks = DraftChunks(turn.parser(0), draft, on_end=keep)
    run = BackgroundRun(turn.answer, chunks, draft, owner, partial(turn.model.run, is_long=True))
    seed = turn.answer.generations[0].ask.request.params.seed
    request = body.model_dump(mode="json", exclude_unset=True) | {"seed": (seed + 2**63) % 2**64 - 2**63}
    left_run = LeftRun(dict(draft.response), request, history, owner)

    def end() -> None:
        if left is not None and run.is_cut_off and store.has(response_id):
            left.resume_later(left_run)
            return
        if left is not None:
            left.forget(response_id)
        keep()
        if not store.has(response_id):
            parts.runs.forget(response_id)

    _keep(body, draft, history, owner, store)
    if left is not None:
        left.note(left_run)
    parts.runs.start(run, on_end=end)
    if left is not None:
        await left.copy(left_run)
    return run


async def _run_again(run: LeftRun, left: LeftRuns, parts: _Parts) -> None:
    """Run a background response again for its owner, unless the leading front has taken it over."""
    with acting_for(run.owner, run.response_id):
        await _begin_again(run, left, parts)


async def _begin_again(run: LeftRun, left: LeftRuns, parts: _Parts) -> None:
    """Begin a background response again as soon as the service is ready."""
    body, response_id = ResponsesRequest.model_validate(run.body), run.response_id
    parts.store.put(run.response, run.messages, run.owner)
    if await left.is_taken(run):
        parts.store.discard(response_id)
    while parts.store.is_running(response_id):  # until it is cancelled or deleted
        try:
            turn = await ChatTurn.open(
                chat_request(body, run.messages),
                parts.model,
                parts.requests,
                request_id=response_id,
                cut_to_fit=True,
            )
        except ApiError as failure:
            if failure.status in (429, 503):
                await asyncio.sleep(_RETRY_S)
                continue
            error = {"code": "server_error", "message": failure.message}
            parts.store.put({**run.response, "status": "failed", "error": error}, run.messages, run.owner)
            break
        if not parts.store.is_running(response_id):
            turn.answer.close()
            break
        draft = _draft(body, parts.model.check_name(body.model), turn)
        draft.response["created_at"] = run.response["created_at"]
        await _start(body, turn, draft, run.messages, run.owner, parts)
        return
    left.forget(response_id)


async def _cancel(response_id: str, parts: _Parts) -> Response:
    stored = parts.store.get(response_id, owner_of_exchange(), "response_id")
    run = parts.runs.find(response_id)
    if stored.is_running and (run is None or run.is_cut_off):  # it waits to run again
        cancelled = {**stored.response, "status": "cancelled"}
        parts.store.put(cancelled, stored.messages, stored.owner)
        return json_response(cancelled)
    if run is None:
        raise bad_request("Cannot cancel a synchronous response.", "response_id")
    await run.cancel()
    if stored.response["status"] != "cancelled":
        raise bad_request(
            f"Cannot cancel a response that has ended: its status is {stored.response['status']!r}.",
            "response_id",
        )
    return await _shown(stored.response, parts.model)


def _history(body: ResponsesRequest, store: ResponseStore) -> list[ChatMessage]:
    """Return the conversation that a request continues, ending with the request's input."""
    given = messages_of(body.input)
    if body.previous_response_id is None:
        return given
    stored = store.get(body.previous_response_id, owner_of_exchange(), "previous_response_id")
    if stored.is_running:
        raise bad_request(
            "previous_response_id is a response that is still running; wait for its end.",
            "previous_response_id",
        )
    return [*stored.messages, *given]


def _draft(body: ResponsesRequest, name: str, turn: ChatTurn) -> ResponseDraft:
    answer, tokenizer = turn.answer, turn.model.tokenizer
    request = answer.generations[0].ask.request
    params = request.params
    return ResponseDraft(
        answer.request_id,
        body,
        name,
        temperature=params.temperature,
        top_p=params.top_p,
        logprobs=TextLogprobs(
            lambda entries: chat_logprobs(entries, tokenizer, body.top_logprobs or 0)["content"],
            tokenizer.special_ids.values(),
        ),
        usage=lambda: _usage(turn),
        prompt=turn.prompt,
        prompt_ids=request.prompt_ids,
    )


def _usage(turn: ChatTurn) -> dict[str, Any]:
    counted = turn.usage()
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": counted["completion_tokens_details"],
        "total_tokens": counted["total_tokens"],
    }
