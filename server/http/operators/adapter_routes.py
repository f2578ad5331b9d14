"""LoRA adapters while serving: load and unload them by vLLM's endpoints and SGLang's, and show their use.

vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` answer with a sentence, SGLang's `/load_lora_adapter` and
`/unload_lora_adapter` with an object. Both check the adapter on all ranks before they answer.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from server.front.adapters.places import PlaceState
from server.front.adapters.registry import Adapters, AdapterUse, KnownAdapters
from server.front.errors import ApiError, bad_request
from server.http.routes import new_router


class LoadForm(BaseModel):
    """An adapter to load, with the fields of both programs."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str
    lora_path: str
    load_inplace: bool = False
    pinned: bool | None = None  # None keeps that of the replaced adapter
    is_3d_lora_weight: bool = False  # vLLM's; the layout is read from the file
    base_model_name: str | None = None
    # The keys that may use it. None means all, or those of the replaced adapter.
    api_keys: list[str] | None = Field(default=None, fail_fast=True)

    @property
    def owners(self) -> tuple[str, ...] | None:
        """Digests of the keys."""
        if self.api_keys is None:
            return None
        return tuple(hashlib.sha256(key.encode()).hexdigest() for key in self.api_keys)


class UnloadForm(BaseModel):
    """An adapter to unload, with the fields of both programs."""

    model_config = ConfigDict(extra="forbid")
    lora_name: str
    lora_int_id: int | None = None  # vLLM's number, which adapters do not have here


def adapter_routes(adapters: Adapters) -> APIRouter:
    """Return the routes."""
    router = new_router()

    async def load(body: LoadForm) -> None:
        if not body.lora_path:
            raise bad_request("lora_path is empty; give the directory of an adapter.", "lora_path")
        if body.api_keys is not None and not (body.api_keys and all(body.api_keys)):
            raise bad_request(
                "api_keys is empty or has an empty key; without api_keys, all keys may use a new adapter.",
                "api_keys",
            )
        await adapters.load(
            body.lora_name,
            body.lora_path,
            replaces=body.load_inplace,
            is_pinned=body.pinned,
            owners=body.owners,
        )
        await adapters.wait_followed()

    async def unload(body: UnloadForm) -> None:
        adapters.unload(body.lora_name)
        await adapters.wait_followed()

    @router.post("/v1/load_lora_adapter", response_model=None, response_class=PlainTextResponse)
    async def load_lora_adapter(body: LoadForm) -> Response:
        """Load an adapter in PEFT's format from a directory that every node has. Requests choose it by its name as `model`."""
        await load(body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_model=None, response_class=PlainTextResponse)
    async def unload_lora_adapter(body: UnloadForm) -> Response:
        """Remove an adapter. Requests that were accepted end as usual."""
        await unload(body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @router.post("/load_lora_adapter", response_model=None)
    async def load_as_sglang(body: LoadForm) -> dict[str, Any]:
        """Load an adapter, by SGLang's endpoint."""
        await load(body)
        return _sglang_answer(adapters)

    @router.post("/unload_lora_adapter", response_model=None)
    async def unload_as_sglang(body: UnloadForm) -> dict[str, Any]:
        """Remove an adapter, by SGLang's endpoint."""
        await unload(body)
        return _sglang_answer(adapters)

    @router.get("/adapters", response_model=None)
    async def show_adapters() -> dict[str, Any]:
        """Show the loaded adapters, which of them the ranks have at a place, and their requests."""
        if not adapters.is_enabled:
            raise ApiError(404, "This server was started without --enable-lora.")
        return {"max_loras": len(adapters.places), "adapters": [_shown(use) for use in adapters.uses()]}

    return router


def _sglang_answer(adapters: Adapters) -> dict[str, Any]:
    loaded = {use.named.name: use.named.directory for use in adapters.uses()}
    return {"success": True, "error_message": "", "loaded_adapters": loaded}


def _shown(use: AdapterUse) -> Mapping[str, Any]:
    named, at_ranks = use
    return {
        "name": named.name,
        "path": named.directory,
        "digest": named.digest,
        "pinned": named.is_pinned,
        "num_keys": len(named.owners),
        "state": at_ranks.state.value if at_ranks.state is not PlaceState.EMPTY else "registered",
        "running": at_ranks.num_running,
        "waiting": at_ranks.is_waiting,
        "requests": at_ranks.num_requests,
        "bytes": at_ranks.num_bytes,
    }


class AdapterMetrics(Collector):  # type: ignore[misc]
    """Exports the use of each adapter. Nothing without --enable-lora."""

    def __init__(self, adapters: KnownAdapters, model_name: str) -> None:
        self._adapters, self._model_name = adapters, model_name

    def describe(self) -> list[Metric]:
        """Return no families: registering must not compute them."""
        return []

    def collect(self) -> Iterator[Metric]:
        if not self._adapters.is_enabled:
            return
        labels = ("model_name", "lora_name")
        resident = GaugeMetricFamily(
            "wideep:adapter_resident", "1 while the ranks have the adapter at a place.", labels=labels
        )
        running = GaugeMetricFamily(
            "wideep:adapter_running_choices", "Choices at ranks that use the adapter.", labels=labels
        )
        begun = CounterMetricFamily(
            "wideep:adapter_choices", "Choices that began to use the adapter.", labels=labels
        )
        size = GaugeMetricFamily(
            "wideep:adapter_bytes", "Bytes of the adapter on the rank with the most.", labels=labels
        )
        for named, at_ranks in self._adapters.uses():
            of = (self._model_name, named.name)
            resident.add_metric(of, float(at_ranks.state is PlaceState.RESIDENT))
            running.add_metric(of, float(at_ranks.num_running))
            begun.add_metric(of, float(at_ranks.num_own_requests))
            size.add_metric(of, float(at_ranks.num_bytes))
        yield from (resident, running, begun, size)
