"""HTTP routes for experts: their load, its records, and their placement.

GET /experts/load, GET /experts/record and SGLang's POST /{start,stop,dump}_expert_distribution_record; POST
/experts/plan, /experts/apply, /experts/rollback and GET /experts/history. Each concerns one pool: that of the query parameter
`pool`, or the first one.

A dump writes files (`record_files`). A record may have 256 MB. A dedicated thread writes files one at a time, so that
neither the event loop nor the threads that tokenize wait for it.
"""

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from expert_placement.config import EplbConfig
from expert_placement.control import Proposal
from expert_placement.files import from_json, to_json
from scheduler.moves.reports import Cause
from server.experts.answer import answer
from server.experts.control import PlacementControl
from server.experts.load import ExpertsLoad
from server.experts.record_files import dump
from server.experts.recorder import Record
from server.front import errors
from server.front.errors import ApiError, bad_request
from server.http.json_writer import json_response, long_json_bytes
from server.http.routes import new_router

SETTLE_S = 3.0  # for the ranks' last reports after a stop; they come about once a second
_PIECE_BYTES = 1 << 18  # of a record in a response
Part = TypeVar("Part")  # each pool has one


def expert_load_routes(
    loads: Mapping[str, ExpertsLoad], *, rank_steps: Callable[[], Mapping[int, int]], record_directory: Path
) -> APIRouter:
    """Return the routes of loads and records.

    Args:
        loads: The load of each pool, by name.
        rank_steps: Returns the last known step of each attached rank.
        record_directory: Folder for dumps.
    """
    router = new_router()
    writing = asyncio.Lock()  # a dump starts a process that imports torch
    writer = ThreadPoolExecutor(1, "record-writer")
    answers: dict[int, _Answers] = {}  # by the first rank of each pool; pools may join

    async def settle(load: ExpertsLoad) -> None:
        """Wait for the reports of a pool's ranks up to their present steps."""
        await load.settle({rank: step for rank, step in rank_steps().items() if rank in load.hosts}, SETTLE_S)

    async def show_load(pool: str | None = None) -> Response:
        """Return the load in the window as JSON."""
        load = of_pool(loads, pool)
        _known(load)
        kept = answers.setdefault(load.first_rank, _Answers(load))
        return Response(await kept.get(), media_type="application/json")

    async def show_record(pool: str | None = None) -> Response:
        """Return the record so far as .npz."""
        load = of_pool(loads, pool)
        _recorded(load)  # refuse before waiting for another dump
        async with writing:
            file = await asyncio.get_running_loop().run_in_executor(writer, _npz_file, _recorded(load))
        return StreamingResponse(_pieces(file, writer), media_type="application/octet-stream")

    async def start_record(pool: str | None = None) -> Response:
        """Clear the record and start recording."""
        load = of_pool(loads, pool)
        _known(load)
        async with writing:  # a dump in progress removes the counts that it has written
            await settle(load)  # exclude steps before the start
            load.recorder.start()
        return PlainTextResponse("Start recording expert distribution.\n")

    async def stop_record(pool: str | None = None) -> Response:
        """Stop recording."""
        load = of_pool(loads, pool)
        if not load.recorder.is_on:
            raise bad_request("No recording is active. POST /start_expert_distribution_record first.")
        await settle(load)
        load.recorder.stop()
        return PlainTextResponse("Stop recording expert distribution.\n")

    async def dump_record(pool: str | None = None) -> Response:
        """Write the record to files and clear it. A concurrent dump waits, and then finds an empty record."""
        load = of_pool(loads, pool)
        async with writing:
            if load.recorder.is_on:
                await settle(load)
            record = _recorded(load)
            paths = await asyncio.get_running_loop().run_in_executor(writer, dump, record, record_directory)
            load.recorder.forget(record)
        lines = "".join(f"{path}\n" for path in paths)
        return PlainTextResponse(f"Dump expert distribution record.\n{lines}")

    router.add_api_route("/experts/load", show_load, methods=["GET"], response_model=None)
    router.add_api_route("/experts/record", show_record, methods=["GET"], response_class=Response)
    for verb, route in (("start", start_record), ("stop", stop_record), ("dump", dump_record)):
        path = f"/{verb}_expert_distribution_record"
        router.add_api_route(path, route, methods=["POST"], response_class=PlainTextResponse)
    return router


def of_pool(pools: Mapping[str, Part], name: str | None) -> Part:
    """Return the entry of a named pool, or that of the first pool without a name.

    Raises:
        ApiError: 400 if the pool does not exist.
    """
    found = next(iter(pools)) if name is None else name
    if found not in pools:
        raise bad_request(f"Pool {found!r} does not exist; the pools are {', '.join(pools)}.", "pool")
    return pools[found]


class _Answers:
    """Builds the response of GET /experts/load in a thread, and reuses it until something changes."""

    def __init__(self, load: ExpertsLoad) -> None:
        self._load, self._made, self._revision = load, b"", -1
        self._making = asyncio.Lock()

    async def get(self) -> bytes:
        """Return the current response."""
        async with self._making:
            if self._revision != self._load.revision:
                revision, snapshot = self._load.revision, self._load.snapshot()
                self._made = await asyncio.to_thread(lambda: long_json_bytes(answer(snapshot)))
                self._revision = revision
            return self._made


def _known(load: ExpertsLoad) -> None:
    if load.experts is None:
        raise errors.not_ready("the experts are not known yet")


def _recorded(load: ExpertsLoad) -> Record:
    if load.experts is None or not load.recorder.num_rows:
        raise bad_request(
            "The record is empty: POST /start_expert_distribution_record was not called, or no step has ended "
            "since."
        )
    return load.recorder.take(load.model, load.experts)


def _npz_file(record: Record) -> IO[bytes]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - `_pieces` closes it
    record.write_npz(file)
    file.seek(0)
    return file


async def _pieces(file: IO[bytes], reader: ThreadPoolExecutor) -> AsyncIterator[bytes]:
    with file:
        while piece := await asyncio.get_running_loop().run_in_executor(reader, file.read, _PIECE_BYTES):
            yield piece


class PlanForm(BaseModel):
    """Options of a plan."""

    model_config = ConfigDict(extra="forbid")
    policy: Literal["repair", "shares", "plan"] = "repair"
    max_moved: float | None = Field(default=None, ge=0, le=1)  # share of all slots; default: the service's


class ApplyForm(PlanForm):
    """The placement to apply: a given one, or the result of a plan."""

    placement: dict[str, Any] | None = None
    wait: bool = True  # respond when the change has ended, not when it has begun


class RollbackForm(BaseModel):
    """Options of a rollback."""

    model_config = ConfigDict(extra="forbid")
    wait: bool = True


def placement_routes(controls: Mapping[str, PlacementControl], config: EplbConfig) -> APIRouter:
    """Return the routes of placements.

    Args:
        controls: The control of each pool, by name.
    """
    router = new_router()

    async def proposed(control: PlacementControl, form: PlanForm) -> Proposal:
        own = config if form.max_moved is None else dataclasses.replace(config, max_moved=form.max_moved)
        return await control.propose(form.policy, own)

    async def make_plan(body: PlanForm | None = None, pool: str | None = None) -> Response:
        """Return a plan with its predicted gain, cost and placement. Nothing changes."""
        proposal = await proposed(of_pool(controls, pool), body or PlanForm())
        return json_response({**summary(proposal), "placement": to_json(proposal.target)})

    async def apply(body: ApplyForm | None = None, pool: str | None = None) -> Response:
        """Apply a placement. Responds when it serves or was dropped, or at once if `wait` is false."""
        form, control = body or ApplyForm(), of_pool(controls, pool)
        if form.placement is None:
            proposal = await proposed(control, form)
            change = control.begin(proposal.target, form.policy, proposal.describe(), proposal.gain)
        else:
            try:
                target = from_json(form.placement)
            except (ValueError, TypeError, KeyError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                raise bad_request(f"Invalid placement: {reason}.", "placement") from error
            change = control.begin(target, "apply", "as requested", None)
        return await became(control, change, form.wait)

    async def rollback(body: RollbackForm | None = None, pool: str | None = None) -> Response:
        """Switch back to the placement before the last change."""
        control = of_pool(controls, pool)
        return await became(control, control.begin_rollback(), body is None or body.wait)

    async def became(
        control: PlacementControl, change: "asyncio.Task[dict[str, Any]]", wait: bool
    ) -> Response:
        """Return the history's entry of a finished change, or the number of a change that has begun."""
        if not wait:
            return json_response({"change": control.num_changes}, 202)
        entry = await asyncio.shield(change)  # it continues if its client disconnects
        if entry["failed"] is None:
            return json_response(entry)
        done, stages = entry["stages"]
        failure = ApiError(
            503 if entry["cause"] == Cause.EPOCH.value else 500,
            f"The change was dropped after {done} of {stages} stages, because of {entry['failed']}. Placement "
            f"{entry['version']} serves.",
        )
        return json_response({**entry, **failure.body()}, failure.status)

    async def show_history(pool: str | None = None) -> Response:
        """Return past decisions and changes, oldest first, and the change in progress."""
        control = of_pool(controls, pool)
        under_way = control.progress()
        serving = to_json(control.serving())
        return json_response(
            {"history": list(control.history.entries), "under_way": under_way, "serving": serving}
        )

    router.add_api_route("/experts/plan", make_plan, methods=["POST"], response_model=None)
    accepted: dict[int | str, dict[str, Any]] = {202: {"description": "The change began (`wait` is false)"}}
    for path, change_placement in (("/experts/apply", apply), ("/experts/rollback", rollback)):
        router.add_api_route(
            path, change_placement, methods=["POST"], response_model=None, responses=accepted
        )
    router.add_api_route("/experts/history", show_history, methods=["GET"], response_model=None)
    return router


def summary(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as JSON, without its placement."""
    return {
        "kind": proposal.kind,
        "imbalance_before": round(proposal.imbalance_before, 6),
        "imbalance_after": round(proposal.imbalance_after, 6),
        "predicted_gain": round(proposal.gain, 6),
        "predicted_saved_s": round(proposal.saved_s, 9),  # per step
        "experts_s": {
            now.name: {
                "share": round(now.share, 6),
                "before": round(now.seconds, 9),
                "after": round(then.seconds, 9),
            }
            for now, then in zip(proposal.before, proposal.after, strict=True)
        },
        "moves": proposal.moves,
        "bytes": proposal.num_bytes,
        "seconds": round(proposal.seconds, 3),
        "reason": proposal.describe(),
    }
