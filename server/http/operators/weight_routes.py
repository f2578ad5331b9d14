"""New base weights while serving, under vLLM's names and SGLang's: pause, update, check.

vLLM's way is /start_weight_update, /update_weights (once or more), /finish_weight_update. SGLang's /update_weights_from_disk does
the three at once. Tensors come from a folder on the node of the HTTP endpoint, or as a safetensors file in the body. /pause and
/resume are not needed around an update: all ranks switch at one step, and open requests continue with the new weights.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest

from server.front.errors import bad_request
from server.front.pausing import PausedRequests, Pausing
from server.front.sleep_mode import SleepWay
from server.front.weights.files import FoundWeights
from server.front.weights.group import WeightGroup
from server.front.weights.updates import WeightUpdates
from server.http.json_text import parse_json
from server.http.routes import new_router, validated

PAUSE_S = 300.0  # of one call, by default
UPDATE_S = 600.0
JOIN_S = 60.0
MAX_CALL_S = 86_400.0
_MAX_LABEL_CHARS = 200
Timeout = Annotated[float, Query(ge=0, le=MAX_CALL_S, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_CALL_S, allow_inf_nan=False)]
# A name, or a number that must not go backwards.
Label = Annotated[str, Field(max_length=_MAX_LABEL_CHARS)] | Annotated[int, Field(ge=0)]


class BeginForm(BaseModel):
    """The beginning of an update."""

    model_config = ConfigDict(extra="forbid")
    weight_version: Label = ""
    partial: bool = False  # tensors that do not come keep their values
    is_checkpoint_format: bool = True


class TensorList(BaseModel):
    """Tensors that rank 0 of the trainer's group broadcasts, in this order."""

    model_config = ConfigDict(extra="ignore")
    names: list[str] = Field(min_length=1, fail_fast=True)
    dtypes: list[str] = Field(validation_alias=AliasChoices("dtypes", "dtype_names"), fail_fast=True)
    shapes: list[Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]] = Field(fail_fast=True)
    packed: bool = False

    def check(self) -> None:
        """Check that the lists belong together.

        Raises:
            ApiError: They do not, or the trainer would send several tensors as one.
        """
        if self.packed:
            raise bad_request("packed is true; tensors must be broadcast one by one.", "packed")
        if not len(self.names) == len(self.dtypes) == len(self.shapes):
            counts = f"{len(self.names)} names, {len(self.dtypes)} dtypes and {len(self.shapes)} shapes"
            raise bad_request(f"There are {counts}; give one of each per tensor.", "names")
        unknown = next((each for each in self.dtypes if each.removeprefix("torch.") not in _DTYPES), None)
        if unknown is not None:
            raise bad_request(f"dtype {unknown!r} is unknown; known are {', '.join(_DTYPES)}.", "dtypes")
        twice = next((name for name, count in Counter(self.names).items() if count > 1), None)
        if twice is not None:
            raise bad_request(f"{twice} is named twice.", "names")


class UpdateForm(BaseModel):
    """Tensors of an update: a folder, or a list of what the trainer's group sends."""

    model_config = ConfigDict(extra="forbid")
    path: str | None = Field(default=None, min_length=1)
    update_info: TensorList | None = None
    timeout_s: _Seconds = UPDATE_S


class JoinForm(BaseModel):
    """A torch.distributed group that a trainer opens. The service is one member."""

    model_config = ConfigDict(extra="ignore")
    master_address: str = Field(min_length=1)
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int = Field(default=1, ge=1)
    world_size: int = Field(ge=2)
    backend: str = "gloo"
    timeout_s: _Seconds = JOIN_S


class TransferForm(BaseModel):
    """vLLM's name for the beginning of a group."""

    init_info: JoinForm


class SentForm(TensorList):
    """SGLang's update with tensors from the trainer's group."""

    weight_version: Label | None = None
    timeout_s: _Seconds = UPDATE_S


class FinishForm(BaseModel):
    """The end of an update."""

    model_config = ConfigDict(extra="forbid")
    weight_version: Label = ""
    timeout_s: _Seconds = UPDATE_S


class LabelForm(BaseModel):
    """Another label for the serving weights."""

    model_config = ConfigDict(extra="forbid")
    new_version: Label
    abort_all_requests: bool = False


class DiskForm(BaseModel):
    """SGLang's update from a folder. Fields about its memory and its loaders have no meaning here."""

    model_config = ConfigDict(extra="ignore")
    model_path: str = Field(min_length=1)
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: Label | None = None


class CheckForm(BaseModel):
    """A check of weights in memory."""

    model_config = ConfigDict(extra="forbid")
    action: str = "checksum"
    timeout_s: _Seconds = UPDATE_S


class GenerationForm(BaseModel):
    """SGLang's pause."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


_BEGIN, _FINISH, _CHECK, _PAUSE = BeginForm(), FinishForm(), CheckForm(), GenerationForm()
_ACTIONS = ("checksum", "compare")
_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "int64")
_LOAD_FORMATS = (None, "auto", "safetensors")


def weight_routes(
    updates: WeightUpdates, pausing: Pausing, requests: PausedRequests, group: WeightGroup
) -> APIRouter:
    """Return the routes."""
    router = new_router()
    _add_pauses(router, pausing)
    _add_updates(router, updates, group)
    _add_groups(router, updates, group)
    _add_facts(router, updates, requests)
    _add_sglang(router, updates, pausing, requests)
    return router


def _add_pauses(router: APIRouter, pausing: Pausing) -> None:
    @router.post("/pause", response_model=None)
    async def pause(
        mode: SleepWay = SleepWay.ABORT, timeout_s: Timeout = PAUSE_S, clear_cache: bool = False
    ) -> dict[str, Any]:
        """Stop computing. New requests are kept until POST /resume.

        `mode` decides about open requests: abort ends them, wait waits for their ends, keep continues them afterwards.
        `clear_cache` is accepted: cached prefixes of other weights are never used, so there is nothing to clear.
        """
        await pausing.pause(mode, timeout_s)
        return {"status": "paused", "is_paused": pausing.is_paused}

    @router.post("/resume", response_model=None)
    async def resume() -> dict[str, Any]:
        """Continue after POST /pause. Does nothing if the service is not paused."""
        pausing.resume()
        return {"status": "resumed", "is_paused": pausing.is_paused}

    @router.get("/is_paused", response_model=None)
    async def is_paused() -> dict[str, Any]:
        """Show whether the service is paused."""
        return {"is_paused": pausing.is_paused}


def _add_updates(router: APIRouter, updates: WeightUpdates, group: WeightGroup) -> None:
    @router.post("/begin_weight_update", response_model=None)
    @router.post("/start_weight_update", response_model=None)
    async def start_weight_update(body: BeginForm = _BEGIN) -> dict[str, Any]:
        """Begin to replace the base weights. Nothing changes before POST /finish_weight_update."""
        if not body.is_checkpoint_format:
            raise bad_request(
                "is_checkpoint_format is false; tensors must have the checkpoint's names and shapes.",
                "is_checkpoint_format",
            )
        updates.begin(str(body.weight_version), is_partial=body.partial)
        return {"status": "started"}

    @router.post("/update_weights", response_model=None)
    async def update_weights(http: HttpRequest) -> dict[str, Any]:
        """Add tensors to the update: `{"path": FOLDER}`, a safetensors file as application/octet-stream, or `{"update_info": ...}`
        with what rank 0 of the trainer's group sends."""
        content = await http.body()
        if not content:
            raise bad_request('The body is missing: send {"path": FOLDER}, or a safetensors file.')
        if "json" in http.headers.get("content-type", "application/json"):
            form = validated(UpdateForm.model_validate, parse_json(content))
            if (form.path is None) == (form.update_info is None):
                raise bad_request("Give either path or update_info.", "path")
            if form.path is not None:
                return _added(await updates.add_folder(form.path))
            assert form.update_info is not None, "one of the two is given"
            return _added(await _receive(updates, group, form.update_info, form.timeout_s))
        return _added(await updates.add_upload(content))

    @router.post("/end_weight_update", response_model=None)
    @router.post("/finish_weight_update", response_model=None)
    async def finish_weight_update(body: FinishForm = _FINISH) -> dict[str, Any]:
        """Load the new weights on all ranks, and switch to them at one step. Answers when all ranks serve them."""
        await updates.finish(str(body.weight_version), body.timeout_s)
        return {"status": "finished", **updates.info()}

    @router.post("/abort_weight_update", response_model=None)
    async def abort_weight_update() -> dict[str, Any]:
        """Drop the update that has begun, if there is one."""
        await updates.abort()
        return {"status": "aborted"}


def _add_groups(router: APIRouter, updates: WeightUpdates, group: WeightGroup) -> None:
    @router.get("/get_world_size", response_model=None)
    async def get_world_size() -> dict[str, Any]:
        """Show how many members of a trainer's group are this service's: one, which passes tensors on to all ranks."""
        return {"world_size": 1}

    @router.post("/init_weights_update_group", response_model=None)
    async def init_weights_update_group(body: JoinForm) -> dict[str, Any]:
        """Join a trainer's torch.distributed group. Answers when all members are there."""
        await _join(group, body)
        return {"success": True, "message": "The group is open."}

    @router.post("/init_weight_transfer_engine", response_model=None)
    async def init_weight_transfer_engine(body: TransferForm) -> dict[str, Any]:
        """Join a trainer's torch.distributed group, by vLLM's name."""
        await _join(group, body.init_info)
        return {"message": "The group is open."}

    @router.post("/destroy_weights_update_group", response_model=None)
    async def destroy_weights_update_group() -> dict[str, Any]:
        """Leave the trainer's group."""
        await group.close()
        return {"success": True, "message": "The group is closed."}

    @router.post("/update_weights_from_distributed", response_model=None)
    async def update_weights_from_distributed(body: SentForm) -> dict[str, Any]:
        """Receive tensors from the trainer's group: for the update that has begun, or as a separate partial update."""
        receive = partial(_receive, updates, group, body, body.timeout_s)
        if updates.is_open:
            return {"success": True, "message": "added", **_added(await receive())}
        await _at_once(updates, body.weight_version, receive, is_partial=True)
        return {"success": True, "message": "The weights are updated.", **updates.info()}


async def _join(group: WeightGroup, body: JoinForm) -> None:
    if body.backend != "gloo":
        raise bad_request(f"backend is {body.backend!r}; only gloo is supported.", "backend")
    if body.world_size != body.rank_offset + 1:
        raise bad_request(
            f"world_size is {body.world_size} with rank_offset {body.rank_offset}; the service is one member (GET "
            f"/get_world_size), so it must be {body.rank_offset + 1}.",
            "world_size",
        )
    await group.join(
        address=body.master_address, port=body.master_port, rank=body.rank_offset, world_size=body.world_size,
        timeout_s=body.timeout_s,
    )  # fmt: skip


async def _receive(
    updates: WeightUpdates, group: WeightGroup, sent: TensorList, timeout_s: float
) -> FoundWeights:
    sent.check()

    async def receive(folder: Path) -> None:
        await group.receive(sent.names, sent.dtypes, sent.shapes, folder, timeout_s)

    return await updates.add_received(receive)


def _add_facts(router: APIRouter, updates: WeightUpdates, requests: PausedRequests) -> None:
    @router.get("/weight_info", response_model=None)
    async def weight_info() -> dict[str, Any]:
        """Show the version of the weights that serves."""
        return updates.info()

    @router.get("/get_weight_version", response_model=None)
    async def get_weight_version() -> dict[str, Any]:
        """Show the version of the weights, in SGLang's format."""
        return {"weight_version": updates.info()["weight_version"]}

    @router.post("/update_weight_version", response_model=None)
    async def update_weight_version(body: LabelForm) -> dict[str, Any]:
        """Give the serving weights another label."""
        updates.relabel(str(body.new_version))
        if body.abort_all_requests:
            requests.abort_all(why="the weights have another version")
        return {"success": True, "message": "The label has changed.", "new_version": str(body.new_version)}

    @router.post("/weights_checker", response_model=None)
    @router.post("/weight_checker", response_model=None)
    async def weight_checker(body: CheckForm = _CHECK) -> dict[str, Any]:
        """Compute the check sums of all weights in memory, and compare copies on different ranks."""
        if body.action not in _ACTIONS:
            raise bad_request(f"action is {body.action!r}; it must be {' or '.join(_ACTIONS)}.", "action")
        return await updates.check(body.timeout_s)


def _add_sglang(
    router: APIRouter, updates: WeightUpdates, pausing: Pausing, requests: PausedRequests
) -> None:
    @router.post("/update_weights_from_disk", response_model=None)
    async def update_weights_from_disk(body: DiskForm) -> dict[str, Any]:
        """Replace the base weights with those of a folder, by SGLang's name."""
        if body.load_format not in _LOAD_FORMATS:
            raise bad_request(
                f"load_format is {body.load_format!r}; only safetensors are read.", "load_format"
            )
        if body.abort_all_requests:
            requests.abort_all(why="its weights change")
        await _at_once(updates, body.weight_version, partial(updates.add_folder, body.model_path))
        return {"success": True, "message": "Succeeded to update model weights.", **updates.info()}

    @router.post("/update_weights_from_tensor", response_model=None, include_in_schema=False)
    async def update_weights_from_tensor() -> dict[str, Any]:
        """Refuse: SGLang's body contains Python pickles, which can run code."""
        raise bad_request(
            "Tensors in Python pickles are not accepted, because pickles can run code. Send a safetensors file to POST "
            "/update_weights."
        )

    @router.post("/pause_generation", response_model=None)
    async def pause_generation(body: GenerationForm = _PAUSE) -> dict[str, Any]:
        """Stop computing, by SGLang's name. Its modes retract and in_place keep open requests."""
        await pausing.pause(SleepWay.ABORT if body.mode == "abort" else SleepWay.KEEP, PAUSE_S)
        return {"status": "ok", "message": "Generation paused successfully."}

    @router.post("/continue_generation", response_model=None)
    async def continue_generation() -> dict[str, Any]:
        """Continue after POST /pause_generation."""
        pausing.resume()
        return {"status": "ok", "message": "Generation continued successfully."}


async def _at_once(
    updates: WeightUpdates,
    label: str | int | None,
    add: Callable[[], Awaitable[FoundWeights]],
    *,
    is_partial: bool = False,
) -> None:
    """Begin and finish an update with the tensors that `add` adds. No update stays open if that fails."""
    updates.begin("" if label is None else str(label), is_partial=is_partial)
    try:
        await add()
        await updates.finish()
    except BaseException:
        await updates.abort()
        raise


def _added(found: FoundWeights) -> dict[str, Any]:
    return {"status": "added", "tensors": len(found.names), "bytes": found.num_bytes}
