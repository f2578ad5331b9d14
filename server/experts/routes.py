"""HTTP about experts: GET /experts/load and /experts/record, and SGLang's POST /{start,stop,dump}_expert_distribution_record.

A dump writes three files: SGLang's own .pt, the same as .json (its `--init-expert-location` reads both), and ours,
.npz with a time axis. The .pt is written by a short-lived child process, because the front keeps torch out.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from server import errors
from server.errors import ApiError
from server.experts.answer import answer
from server.experts.load import ExpertsLoad
from server.experts.recorder import Record
from server.http.json_parts import encode
from server.http.routes import new_router

SETTLE_S = 3.0  # how long a stop waits for the ranks' last reports, which come about once a second
_PT_WRITER = Path(__file__).with_name("record_to_pt.py")
_PT_TIMEOUT_S = 120.0


def experts_routes(
    load: ExpertsLoad, *, rank_steps: Callable[[], Mapping[int, int]], record_directory: Path
) -> APIRouter:
    """Return the routes.

    Args:
        rank_steps: by attached rank, the last step that it is known to have reached.
        record_directory: where dumps are written.
    """
    router = new_router()
    dumping = asyncio.Lock()  # each starts a process with torch in it

    answers = _Answers(load)

    async def show_load() -> Response:
        """The window's load as JSON."""
        _known(load)
        return Response(await answers.get(), media_type="application/json")

    async def show_record() -> Response:
        """What was recorded so far, as .npz."""
        record = _recorded(load)
        return Response(await asyncio.to_thread(record.npz), media_type="application/octet-stream")

    async def start_record() -> Response:
        """Forget what was recorded, and record."""
        _known(load)
        await load.settle(rank_steps(), SETTLE_S)  # what happened before the start is not recorded
        load.recorder.start()
        return PlainTextResponse("Start recording expert distribution.\n")

    async def stop_record() -> Response:
        """Record no more."""
        if not load.recorder.is_on:
            raise errors.bad_request(
                "Nothing is being recorded; POST /start_expert_distribution_record first."
            )
        await load.settle(rank_steps(), SETTLE_S)
        load.recorder.stop()
        return PlainTextResponse("Stop recording expert distribution.\n")

    async def dump_record() -> Response:
        """Write the files, and forget what was recorded; who asks meanwhile waits, and finds nothing."""
        async with dumping:
            if load.recorder.is_on:
                await load.settle(rank_steps(), SETTLE_S)
            paths = await asyncio.to_thread(_write, _recorded(load), record_directory)
            load.recorder.clear()
        lines = "".join(f"{path}\n" for path in paths)
        return PlainTextResponse(f"Dump expert distribution record.\n{lines}")

    router.add_api_route("/experts/load", show_load, methods=["GET"], response_model=None)
    router.add_api_route("/experts/record", show_record, methods=["GET"], response_class=Response)
    for verb, route in (("start", start_record), ("stop", stop_record), ("dump", dump_record)):
        path = f"/{verb}_expert_distribution_record"
        router.add_api_route(path, route, methods=["POST"], response_class=PlainTextResponse)
    return router


class _Answers:
    """Makes the answer of GET /experts/load in a thread, once for as long as nothing changes."""

    def __init__(self, load: ExpertsLoad) -> None:
        self._load, self._made, self._revision = load, b"", -1
        self._making = asyncio.Lock()

    async def get(self) -> bytes:
        """The answer as it is now."""
        async with self._making:
            if self._revision != self._load.revision:
                revision, snapshot = self._load.revision, self._load.snapshot()
                self._made = await asyncio.to_thread(lambda: encode(answer(snapshot)))
                self._revision = revision
            return self._made


def _known(load: ExpertsLoad) -> None:
    if load.experts is None:
        raise errors.not_ready("rank 0 has not said yet which experts there are")


def _recorded(load: ExpertsLoad) -> Record:
    if load.experts is None or not load.recorder.num_rows:
        raise errors.bad_request(
            "Nothing has been recorded: no step has ended since POST /start_expert_distribution_record, or nobody "
            "called it."
        )
    return load.recorder.take(load.model, load.experts)


def _write(record: Record, directory: Path) -> list[Path]:
    """Write a record in all formats; returns the paths."""
    stem = directory / f"expert_distribution_recorder_{time.time()}"  # SGLang's name
    as_npz, as_json, as_pt = (stem.with_name(stem.name + ending) for ending in (".npz", ".json", ".pt"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        as_npz.write_bytes(record.npz())
        as_json.write_text(json.dumps(record.sglang()))
    except OSError as error:
        raise ApiError(500, f"The record cannot be written to {directory}: {error.strerror}.") from error
    _write_pt(as_json, as_pt)
    return [as_pt, as_json, as_npz]


def _write_pt(source: Path, target: Path) -> None:
    command: list[Any] = [sys.executable, "-P", _PT_WRITER, source, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PT_TIMEOUT_S)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ApiError(500, f"{source} is written, {target.name} could not be: {last}.")
