"""Endpoints about the service itself, which clients of OpenAI, vLLM, SGLang and SageMaker expect.

- GET /v1/models and /v1/models/{id}: the served names. GET /load: the number of unfinished requests (vLLM).
- GET /tokenizer_info: the tokenizer's configuration (vLLM).
- GET /get_model_info, /get_server_info and /health_generate, and the first two without "get_" (SGLang).
- POST /reset_prefix_cache (vLLM) and /flush_cache (SGLang): empty the prefix cache for later requests, KV tiers included.
  Running requests keep their blocks, so, unlike in those servers, they never cause a refusal.
- POST /invocations (SageMaker): accepts a chat or a completion, distinguished by their fields as in vLLM. The endpoint for
  that kind answers, including errors.
"""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from scheduler.policy.request import Request, SamplingParams
from server.api.openai.chat import answer_chat
from server.api.openai.completions import answer_completion
from server.api.schemas import ChatRequest, CompletionRequest
from server.api.served import ServedModel
from server.front.errors import ApiError, bad_request
from server.front.generations import Ask
from server.front.requests import Requests
from server.http.routes import STREAM_RESPONSE, new_router, validated
from server.link.messages import RankFacts
from server.options.pools import Pool, num_ranks_of

GENERATES_WITHIN_S = 20.0  # SGLang's, for /health_generate


def service_routes(
    model: ServedModel,
    requests: Requests,
    *,
    version: str,
    pools: Callable[[], Sequence[Pool]],
    facts: Callable[[], Sequence[RankFacts]] = tuple,
    forget_prefixes: Callable[[], None] = lambda: None,
    target_itl_ms: float | None = None,
    shows_path: bool = True,
    weight_version: Callable[[], str] = lambda: "",
) -> APIRouter:
    """Return the endpoints' routes.

    Args:
        pools: Returns the pools. `facts`: Returns the facts of the attached ranks.
        forget_prefixes: Orders all ranks to empty their prefix cache.
        target_itl_ms: Target time between tokens for steps that include prompts; None if no target is set.
        shows_path: Show the model's path in /server_info, which needs no key.
        weight_version: Returns the label of the serving weights, "" if they have none.
    """
    router = new_router()

    @router.get("/v1/models", response_model=None)
    async def list_models() -> dict[str, Any]:
        """List every served name."""
        return {"object": "list", "data": [_card(model, name) for name in model.all_names]}

    @router.get("/v1/models/{name:path}", response_model=None)
    async def show_model(name: str) -> dict[str, Any]:
        """Show one served name."""
        return _card(model, model.check_name(name))

    @router.get("/load", response_model=None)
    async def show_load() -> dict[str, int]:
        """Show the number of accepted requests that are not finished."""
        return {"server_load": requests.num_answers}

    @router.get("/tokenizer_info", response_model=None)
    async def show_tokenizer() -> dict[str, Any]:
        """Show the tokenizer's configuration and its chat template."""
        return model.tokenizer.configuration()

    _add_sglang_routes(
        router,
        model,
        requests,
        version=version,
        pools=pools,
        facts=facts,
        target_itl_ms=target_itl_ms,
        shown_path=model.directory if shows_path else model.names[0],
        weight_version=weight_version,
    )

    _add_cache_routes(router, forget_prefixes)

    @router.post("/invocations", response_model=None, responses=STREAM_RESPONSE)
    async def invoke(body: dict[str, Any], http: HttpRequest) -> Response:
        """Answer a chat or a completion."""
        if "messages" in body:
            chat = validated(ChatRequest.model_validate, body)
            return await answer_chat(chat, http, model, requests)
        if "prompt" in body:
            completion = validated(CompletionRequest.model_validate, body)
            return await answer_completion(completion, http, model, requests)
        raise bad_request("Send messages, as for /v1/chat/completions, or prompt, as for /v1/completions.")

    return router


def _add_cache_routes(router: APIRouter, forget_prefixes: Callable[[], None]) -> None:
    """Add the routes that empty the prefix cache."""

    @router.post("/reset_prefix_cache", response_model=None, response_class=Response)
    async def reset_prefix_cache(
        reset_running_requests: bool = False, reset_external: bool = False
    ) -> Response:
        """Empty the prefix cache for later requests, KV tiers included, with or without reset_external.

        Running requests continue, with or without reset_running_requests.
        """
        forget_prefixes()
        return Response()

    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        """Empty the prefix cache for later requests."""
        forget_prefixes()
        return PlainTextResponse("Cache flushed.\n")

    @router.get("/flush_cache", response_model=None, include_in_schema=False)
    async def refuse_flush() -> Response:
        """Refuse GET: a web page can make a browser send it without the user's consent."""
        raise ApiError(
            405, "Use POST for /flush_cache: it changes the service's state.", headers={"Allow": "POST"}
        )


def _add_sglang_routes(
    router: APIRouter,
    model: ServedModel,
    requests: Requests,
    *,
    version: str,
    pools: Callable[[], Sequence[Pool]],
    facts: Callable[[], Sequence[RankFacts]],
    target_itl_ms: float | None,
    shown_path: str,
    weight_version: Callable[[], str],
) -> None:
    """Add SGLang's routes."""
    health = _GenerationCheck(requests)

    @router.get("/get_model_info", response_model=None)
    @router.get("/model_info", response_model=None)
    async def show_model_info() -> dict[str, Any]:
        """Show the model in SGLang's format."""
        return {
            "model_path": model.directory,
            "tokenizer_path": model.directory,
            "is_generation": True,
            "preferred_sampling_params": model.sampling_defaults or None,
            "weight_version": weight_version() or "default",
            "has_image_understanding": model.images is not None,
            "has_audio_understanding": False,
        }

    @router.get("/get_server_info", response_model=None)
    @router.get("/server_info", response_model=None)
    async def show_server_info() -> dict[str, Any]:
        """Show the server in SGLang's format, with the fields that apply here: attention is data-parallel. `ep_size` is that
        of the first pool."""
        ranks, now = facts(), pools()
        return {
            "version": version,
            "model_path": shown_path,
            "served_model_name": model.names[0],
            "context_length": model.max_len(),
            "tp_size": 1,
            "dp_size": num_ranks_of(now),
            "ep_size": now[0].num_ranks,
            "pools": [
                {"pool": pool.name, "role": pool.role.value, "ranks": list(pool.ranks)} for pool in now
            ],
            "device": ranks[0].device if ranks else None,
            "page_size": ranks[0].block_tokens if ranks else None,
            "chunked_prefill_size": ranks[0].max_num_batched_tokens if ranks else None,
            "target_itl_ms": target_itl_ms,
            "max_total_num_tokens": sum(rank.num_blocks * rank.block_tokens for rank in ranks),
            "max_running_requests": sum(rank.max_num_seqs for rank in ranks),
            "internal_states": [_state(rank) for rank in ranks],
        }

    @router.get("/health_generate", response_model=None, response_class=Response)
    async def check_generation() -> Response:
        """Answer 200 once a rank has generated a token. Concurrent calls share one token."""
        await health.run()
        return Response()


class _GenerationCheck:
    """Let a rank generate one token, as a health check."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._running: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a token.

        Raises:
            ApiError: 503 if the service is not ready, or did not generate a token in time.
        """
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._generate())
        await asyncio.shield(self._running)

    async def _generate(self) -> None:
        request = Request(
            request_id=f"health-{uuid.uuid4().hex}",
            prompt_ids=(0,),
            params=SamplingParams(max_tokens=1, temperature=0.0),
            arrival_s=0.0,
        )
        answer = self._requests.open(request.request_id, [Ask(request=request)], is_probe=True)
        try:
            async with asyncio.timeout(GENERATES_WITHIN_S):
                while await answer.next():
                    pass
        except TimeoutError:
            raise ApiError(503, f"No token was generated within {GENERATES_WITHIN_S:g} s.") from None
        finally:
            answer.close()


def _state(rank: RankFacts) -> dict[str, Any]:
    """Return one rank in the form in which SGLang shows a data-parallel rank."""
    return {
        "dp_rank": rank.rank,
        "max_total_num_tokens": rank.num_blocks * rank.block_tokens,
        "max_running_requests": rank.max_num_seqs,
    }


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    adapter = model.adapter_of(name)
    return {
        "id": name,
        "object": "model",
        "created": model.created if adapter is None else adapter.created,
        "owned_by": "wideep",
        "root": model.names[0] if adapter is None else adapter.directory,
        "parent": None if adapter is None else model.names[0],
        "max_model_len": model.max_len(),
        "input_modalities": ["text"] if model.images is None else ["text", "image"],
        "permission": [_permission(name, model.created)],
    }


def _permission(name: str, created: int) -> dict[str, Any]:
    """Return a field that OpenAI dropped in 2023 and some clients still read, with the same values as vLLM."""
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
