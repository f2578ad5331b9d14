"""`wideep run-batch`: answer a file of requests and write each answer as soon as it is available.

It is an ordinary client of the HTTP endpoint, either of a private service that it starts and stops or of a running service.
Every input line gets one output line, even an invalid one. Temporary failures (a lost service, or one that is full for a
minute) are not written: they end the run, and the same command continues from there later.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from server.api.openai.batches.bulk_client import BulkClient, ServiceLostError, for_each
from server.api.openai.batches.input_lines import BadLine, BatchFileError, BatchLine, read_batch
from server.api.openai.batches.output_lines import BatchOutput, answer_entry, refusal_entry
from server.clients.private_service import PrivateService, ServiceEndedError
from server.clients.progress import RequestProgress
from server.http.client import ServiceError, api_key_of
from server.machine.interrupts import run_interruptibly, terminate_as_interrupt
from server.machine.lines import printable
from server.options.reading import said_in
from server.options.table import Options

URL_CONCURRENCY = 64  # for a service of unknown size


def run_batch(
    args: argparse.Namespace, options: Options | None, *, environment: Mapping[str, str] = os.environ
) -> int:
    """Answer the batch of the command line.

    Args:
        args: Parsed arguments, with the flags of `flags`.
        options: Options of the service to start; None with --url.

    Returns:
        The exit status: 0 if every line has a good answer, 2 if a file is invalid, 1 otherwise.
    """
    try:
        with terminate_as_interrupt(), BatchOutput(args.output_file) as output:
            num_open = _begin(args.input_file, output)
            if num_open:
                _answer(args, options, output, num_open, environment)
            return _finish(args.input_file, output)
    except (BatchFileError, ServiceError, ServiceEndedError) as error:
        _say(str(error))
        return 2 if isinstance(error, BatchFileError) else 1
    except KeyboardInterrupt:
        _say("stopped; run the same command again to continue")
        return 1


def _begin(input_file: Path, output: BatchOutput) -> int:
    """Report the lines that are already answered, and return the number of remaining lines."""
    num_open = sum(1 for _ in _open_lines(input_file, output))
    if output.was_torn:
        _say("removed the incomplete last line of the output")
    if output.answered:
        _say(f"{len(output.answered)} lines are already answered, {num_open} remain")
    return num_open


def _answer(
    args: argparse.Namespace,
    options: Options | None,
    output: BatchOutput,
    num_open: int,
    environment: Mapping[str, str],
) -> None:
    """Answer the remaining lines with the selected service."""
    if options is None:
        client = BulkClient(
            args.url,
            api_key_of(environment, said_in(args).get("api_key", ())),
            concurrency=args.concurrency or URL_CONCURRENCY,
        )
        _run(args.input_file, output, client, num_open)
        return
    _say(f"starting {options.served_model_names[0]}")
    with PrivateService(options) as service:
        service.wait_ready()
        client = BulkClient(
            service.url,
            service.api_key,
            concurrency=args.concurrency or service.num_places,
            why_gone=service.why_gone,
        )
        _run(args.input_file, output, client, num_open)


def _run(input_file: Path, output: BatchOutput, client: BulkClient, num_open: int) -> None:
    with RequestProgress(num_open, "wideep run-batch", lines=True) as progress:
        run_interruptibly(_answer_all(input_file, output, client, progress))


async def _answer_all(
    input_file: Path, output: BatchOutput, client: BulkClient, progress: RequestProgress
) -> None:
    async def answer(line: BatchLine | BadLine) -> None:
        if isinstance(line, BadLine):
            entry = refusal_entry(line)
        else:
            entry = answer_entry(line, await client.post(line.url, line.body))
        progress.step(failed=not output.append(entry))

    async with client:
        access = await client.get("/v1/models")
        if access.status in (401, 403):
            raise ServiceLostError(f"the service refused ({access.status}): {access.complaint}")
        with contextlib.closing(_open_lines(input_file, output)) as lines:
            await for_each(lines, answer, concurrency=client.concurrency)


def _open_lines(input_file: Path, output: BatchOutput) -> Generator[BatchLine | BadLine, None, None]:
    """Yield the input lines without an output line."""
    yield from (line for line in read_batch(input_file) if line.key not in output.answered)


def _finish(input_file: Path, output: BatchOutput) -> int:
    """Report the result of the whole batch, and return the exit status."""
    verdicts = [output.answered.get(line.key, False) for line in read_batch(input_file)]
    num_failed = verdicts.count(False)
    _say(
        f"{len(verdicts) - num_failed} of {len(verdicts)} lines have successful responses"
        + (f"; the output has the errors of the other {num_failed}" if num_failed else "")
    )
    return 1 if num_failed else 0


def _say(text: str) -> None:
    print(f"wideep run-batch: {printable(text)}", file=sys.stderr, flush=True)
