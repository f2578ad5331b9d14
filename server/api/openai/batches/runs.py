"""Run batches: check them, answer each line through the service's own endpoints, and turn the answers into files.

Lines of all batches share a few places and take turns. A line takes one place for each of its choices (prompts times n). A step's
time grows with its choices, so batches get a quarter of the choices that the ranks run at once, minus the choices of other
requests, and at least one. A line with more choices runs alone, with as many at a time as there are places. With 16 requests, a
quarter of a CPU rank's 64, the README's model generates 80 % of the tokens per second that it generates with 32, at 29 ms between
a request's tokens instead of 47. So interactive users find most places free, and batches wait while the service is busy.

Every answer is written as soon as it is complete, to separate files for good answers and others, each line once. A restarted front
reads from these files which lines were answered; lines that were running run again. Temporary failures (a start, an absent rank)
are retried by `bulk_client`, here until the batch's window closes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.types import ASGIApp

from server.api.openai.batches.batch_store import Batch, BatchStatus, BatchStore
from server.api.openai.batches.bulk_client import BulkClient, Reply, ServiceLostError
from server.api.openai.batches.file_store import FileStore, is_full, new_id
from server.api.openai.batches.input_lines import BadLine, BatchFileError, BatchLine, read_batch
from server.api.openai.batches.output_lines import BatchOutput, answer_entry, entry_without_answer
from server.front.errors import bad_request
from server.http.exchanges import answering_line
from server.http.json_text import trouble_with_nesting
from server.http.json_writer import long_json_bytes
from server.machine.tasks import logging_errors

SHARE = 4  # batches get one in SHARE of the choices that ranks run at once
MAX_LINES = 50_000  # OpenAI's
MAX_ERRORS = 100  # errors shown per batch
LOOK_AGAIN_S = 0.5  # interval between checks for free places
LOST_PAUSE_S = 5.0  # after retries of about a minute
SWEEP_S = 60.0
_LOG = logging.getLogger("wideep.front")


class LinePlaces:
    """Places for the choices of batch lines. The line that has waited longest goes first."""

    def __init__(self, num_places: Callable[[], int], num_others: Callable[[], int]) -> None:
        """Args: num_places returns the number of choices that ranks run at once, num_others that of other open choices."""
        self._num_places, self._num_others = num_places, num_others
        self.num_taken = 0
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def limit(self) -> int:
        """The number of choices of batches that may run now."""
        num_places = self._num_places()
        return max(1, num_places // SHARE - self._num_others()) if num_places else 0

    async def enter(self, num_choices: int) -> int:
        """Wait for places and take them. Returns their number, which is lower than `num_choices` only if the line is alone."""
        async with self._turn:
            while not (num_granted := self._grant(num_choices)):
                self._left.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._left.wait(), LOOK_AGAIN_S)
            self.num_taken += num_granted
            return num_granted

    def _grant(self, num_choices: int) -> int:
        num_free = self.limit - self.num_taken
        return num_choices if num_choices <= num_free else 0 if self.num_taken else num_free

    def leave(self, num_granted: int) -> None:
        """Release places."""
        self.num_taken -= num_granted
        self._left.set()


class _NoRoomError(BatchFileError):
    """A batch's owner has used its share of the bytes for files, beyond which the rest stays free for others."""


class _Checked(NamedTuple):
    """The result of checking an input."""

    num_lines: int
    errors: list[dict[str, Any]]


class _Outputs(NamedTuple):
    """A running batch's answer files."""

    good: BatchOutput
    rest: BatchOutput


class BatchRuns:
    """The unfinished batches, each a task."""

    def __init__(self, batches: BatchStore, files: FileStore, room: LinePlaces, endpoints: ASGIApp) -> None:
        """Args: endpoints answer the lines, without an API key."""
        self._batches, self._files, self._room = batches, files, room
        self._client = BulkClient(
            "http://batches",
            None,
            concurrency=1,
            transport=httpx.ASGITransport(endpoints, raise_app_exceptions=False),
        )
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[BatchStatus]] = {}  # cancelled by `cancel`

    async def serve(self) -> None:
        """Continue the batches of an earlier front, and remove expired files and batches, until cancelled."""
        try:
            for batch in self._batches.open_batches:
                self.start(batch)
            while True:
                await asyncio.sleep(SWEEP_S)
                with logging_errors("expired files and batches cannot be removed now"):
                    self._files.expire()
                    self._batches.expire()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            self._files.close()

    def start(self, batch: Batch) -> None:
        """Start a batch."""
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._forget(batch))

    def cancel(self, batch: Batch) -> None:
        """Cancel a batch and keep its answers.

        Raises:
            ApiError: 400 if it has ended or is about to.
        """
        if batch.status is BatchStatus.CANCELLING:
            return
        if batch.outcome is not None or batch.has_ended:
            raise bad_request(f"Cannot cancel a batch with status {str(batch.status)!r}.", "batch_id")
        self._batches.enter(batch, BatchStatus.CANCELLING)
        if work := self._work.get(batch.id):
            work.cancel()

    def _forget(self, batch: Batch) -> None:
        self._tasks.pop(batch.id, None)
        self._work.pop(batch.id, None)

    async def _run(self, batch: Batch) -> None:
        if batch.outcome is None:
            work = self._work[batch.id] = asyncio.create_task(self._answer_within_window(batch))
            try:
                batch.outcome = await work
            except asyncio.CancelledError:
                if batch.status is not BatchStatus.CANCELLING:  # the service is stopping
                    raise
                batch.outcome = BatchStatus.CANCELLED
        while True:
            try:
                await self._finish(batch)
                return
            except (OSError, BatchFileError) as error:
                _LOG.error(
                    "%s has ended but cannot be stored: %s; retrying in %g s", batch.id, error, SWEEP_S
                )
            self._batches.show(batch, batch.outcome)  # its client need not wait for the disk
            await asyncio.sleep(SWEEP_S)

    async def _answer_within_window(self, batch: Batch) -> BatchStatus:
        """Check and answer a batch. Returns its final status."""
        if batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        try:
            try:
                async with asyncio.timeout(max(0.0, batch.expires_at - self._files.now_s)):
                    if batch.status is BatchStatus.VALIDATING and not await self._check(batch):
                        return BatchStatus.FAILED
                    await self._answer_all(batch)
            except TimeoutError:
                await asyncio.to_thread(self._give_up_lines, batch)
                return BatchStatus.EXPIRED
        except BatchFileError as error:
            batch.errors = [_unwritten(error)]
            return BatchStatus.FAILED
        except Exception as error:  # noqa: BLE001 - otherwise its client would poll forever
            _LOG.exception("%s failed", batch.id)
            batch.errors = [_error("server_error", f"The batch failed: {type(error).__name__}.")]
            return BatchStatus.FAILED
        return BatchStatus.COMPLETED

    async def _check(self, batch: Batch) -> bool:
        """Return whether a batch may run. Records the errors if not."""
        checked = await asyncio.to_thread(_check, self._files.path_of(batch.input_file_id), batch.endpoint)
        batch.num_lines, batch.errors = checked.num_lines, checked.errors
        if not batch.errors:
            self._batches.enter(batch, BatchStatus.IN_PROGRESS)
        return not batch.errors

    async def _answer_all(self, batch: Batch) -> None:
        with contextlib.ExitStack() as files:
            outputs = await _to_the_end(self._open, batch, files)
            self._note_size(batch, outputs)
            has_room = True
            lines = self._open_lines(batch, outputs)
            try:
                async with asyncio.TaskGroup() as group:
                    while (line := await asyncio.to_thread(next, lines, None)) is not None:
                        has_room = self._files.may_grow(batch.owner)
                        if not has_room:
                            break  # running lines are still answered
                        num_granted = await self._room.enter(num_choices(line))
                        answering = group.create_task(self._answer(batch, line, outputs, num_granted))
                        answering.add_done_callback(self._leaving(num_granted))
            except ExceptionGroup as failures:
                first = failures.exceptions[0]
                raise first from first.__cause__  # the cause shows whether the disk is full
            if not has_room:
                raise _NoRoomError("the owner's files have no room for more answers")

    def _leaving(self, num_granted: int) -> Callable[[asyncio.Task[None]], None]:
        """Return a callback that releases places when a task ends, even if it was cancelled before it began."""
        return lambda _: self._room.leave(num_granted)

    def _open(self, batch: Batch, files: contextlib.ExitStack) -> _Outputs:
        """Open a batch's answer files and count the answers."""
        good, rest = (files.enter_context(BatchOutput(path, 0o600)) for path in self._batches.paths_of(batch))
        batch.num_good, batch.num_failed = len(good.answered), len(rest.answered)
        return _Outputs(good, rest)

    def _note_size(self, batch: Batch, outputs: _Outputs) -> None:
        """Count a batch's answers against the limit for files."""
        self._files.note_growing(batch.id, batch.owner, sum(each.num_bytes for each in outputs))

    def _open_lines(self, batch: Batch, outputs: _Outputs) -> Iterator[BatchLine]:
        """Yield the lines without an answer."""
        for line in read_batch(self._files.path_of(batch.input_file_id), _why_not):
            if isinstance(line, BatchLine) and not any(line.key in each.answered for each in outputs):
                yield line

    async def _answer(self, batch: Batch, line: BatchLine, outputs: _Outputs, num_granted: int) -> None:
        with answering_line(batch.owner, num_granted):
            reply = await self._reply(line)
        entry = answer_entry(line, reply)
        encoded = await asyncio.to_thread(long_json_bytes, entry)
        (outputs.good if reply.is_good else outputs.rest).append(entry, encoded)
        batch.num_good, batch.num_failed = len(outputs.good.answered), len(outputs.rest.answered)
        self._note_size(batch, outputs)

    async def _reply(self, line: BatchLine) -> Reply:
        while True:
            try:
                return await self._client.post(line.url, line.body)
            except ServiceLostError:
                await asyncio.sleep(LOST_PAUSE_S)

    def _give_up_lines(self, batch: Batch) -> None:
        """Write an error for every unanswered line: the window has closed."""
        words = "batch_expired", "The completion window closed before this request was answered."
        with contextlib.ExitStack() as files:
            outputs = self._open(batch, files)
            for line in self._open_lines(batch, outputs):
                outputs.rest.append(entry_without_answer(line, *words))
            batch.num_failed = len(outputs.rest.answered)

    async def _finish(self, batch: Batch) -> None:
        """Turn the answers into files and end the batch. May be repeated, also by a restarted front.

        Raises:
            OSError, BatchFileError: Something could not be stored. The answers can be read nevertheless.
        """
        assert batch.outcome is not None, "_finish was called before the outcome was set"
        good_path, rest_path = self._batches.paths_of(batch)
        if batch.output_file_id is None and await asyncio.to_thread(_has_lines, good_path):
            batch.output_file_id = new_id("file-")
        if batch.error_file_id is None and await asyncio.to_thread(_has_lines, rest_path):
            batch.error_file_id = new_id("file-")
        self._files.note_growing(batch.id, batch.owner, 0)
        for path, file_id, kind in (
            (good_path, batch.output_file_id, "output"),
            (rest_path, batch.error_file_id, "error"),
        ):
            if file_id is not None:
                name, lifetime_s = f"{batch.id}_{kind}.jsonl", batch.answers_lifetime_s
                self._files.lend(path, file_id, owner=batch.owner, filename=name, lifetime_s=lifetime_s)
        if batch.outcome in (BatchStatus.COMPLETED, BatchStatus.EXPIRED) and not batch.has_ended:
            self._batches.show(batch, BatchStatus.FINALIZING)
        self._batches.record_outcome(batch)
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self._files.adopt(file_id)
        for path in (good_path, rest_path):
            path.unlink(missing_ok=True)
        self._batches.record(batch, batch.outcome)


async def _to_the_end(work: Callable[..., _Outputs], *arguments: Any) -> _Outputs:
    """Run work in a thread and wait for its end even if cancelled: otherwise the files that it opens would stay open."""
    doing = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


def _why_not(text: bytes) -> str | None:
    """Return why a line is too costly to parse, or None. The limits are those of a request's body."""
    trouble = trouble_with_nesting(text)
    return None if trouble is None else trouble.message.replace("The body", "the line")


def _check(path: Path, endpoint: str) -> _Checked:
    """Check every line of an input."""
    errors: list[dict[str, Any]] = []
    num_lines = 0
    for line in read_batch(path, _why_not):
        num_lines += 1
        if isinstance(line, BadLine):
            errors.append(_error(line.code, line.reason, line.param, line.number))
        elif line.url != endpoint:
            message = f"line {line.number}: url is {line.url!r}, but the batch's endpoint is {endpoint!r}"
            errors.append(_error("mismatched_url", message, "url", line.number))
        if num_lines > MAX_LINES:
            errors.append(_error("too_many_lines", f"a batch has at most {MAX_LINES} requests"))
        if len(errors) >= MAX_ERRORS or num_lines > MAX_LINES:
            break
    if not num_lines:
        errors.append(_error("empty_file", "the file has no requests"))
    return _Checked(num_lines, errors)


def num_choices(line: BatchLine) -> int:
    """Return the number of a line's choices: its prompts times n. Invalid values count as one."""
    n, prompt = line.body.get("n"), line.body.get("prompt")
    per_prompt = n if isinstance(n, int) and n > 0 else 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        return per_prompt * len(prompt)
    return per_prompt


def _error(code: str, message: str, param: str | None = None, line: int | None = None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": param, "line": line}


def _unwritten(error: BatchFileError) -> dict[str, Any]:
    """Return the error of unusable batch files, without this machine's paths."""
    if isinstance(error, _NoRoomError):
        return _error(
            "files_full",
            "The files of your API key use its whole share (--max-files-bytes): delete some, and send the unanswered lines "
            "in another batch. The answers so far are kept.",
        )
    cause = error.__cause__
    if isinstance(cause, OSError) and is_full(cause):
        return _error(
            "disk_full",
            "The disk with this server's files (--files-dir) is full; the answers so far are kept.",
        )
    _LOG.error("%s", error)
    return _error(
        "server_error",
        "The batch's files cannot be read or written; see the server's log. The answers so far are kept.",
    )


def _has_lines(path: Path) -> bool:
    """Return whether a file has answers. Removes a torn line, which a full disk leaves."""
    if not path.exists():
        return False
    with BatchOutput(path) as output:
        return bool(output.answered)
