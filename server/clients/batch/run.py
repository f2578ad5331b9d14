"""`wideep run-batch`: answer a file of requests and write the answers down, each as soon as it is there.

An ordinary client of the endpoint: of a service of its own, which it starts and ends, or of one that runs. Every line
of the input gets one line of the output, bad ones too. What fails for a reason that passes (a service that is lost, or
full for a minute) is not written: it ends the run, and the same command goes on from there later.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from server.batches.bulk_client import BulkClient, ServiceLostError, for_each
from server.batches.input_lines import BadLine, BatchFileError, BatchLine, read_batch
from server.batches.output_lines import BatchOutput, answer_entry, refusal_entry
from server.clients.connection import api_key_of
from server.clients.progress import RequestProgress
from server.interrupts import run_interruptibly, terminate_as_interrupt
from server.lines import printable
from server.options.reading import said_in
from server.options.table import Options
from server.process.private_service import PrivateService, ServiceEndedError

URL_CONCURRENCY = 64  # with a service whose size we do not know


def run_batch(
    args: argparse.Namespace, options: Options | None, *, environment: Mapping[str, str] = os.environ
) -> int:
    """Answer the batch that the command line names.

    Args:
        args: see `flags`.
        options: of the service to start; None with --url.

    Returns:
        The exit status: 0 if every line has a good answer, 1 if not or if the batch was stopped, 2 for wrong files.
    """
    try:
        with terminate_as_interrupt(), BatchOutput(args.output_file) as output:
            num_open = _begin(args.input_file, output)
            if num_open:
                _answer(args, options, output, num_open, environment)
            return _finish(args.input_file, output)
    except (BatchFileError, ServiceLostError, ServiceEndedError) as error:
        _say(str(error))
        return 2 if isinstance(error, BatchFileError) else 1
    except KeyboardInterrupt:
        _say("stopped; the same command goes on from here")
        return 1


def _begin(input_file: Path, output: BatchOutput) -> int:
    """Say what is done already; returns the lines to go."""
    num_open = sum(1 for _ in _open_lines(input_file, output))
    if output.was_torn:
        _say("cut off the output's last line, which was torn")
    if output.answered:
        _say(f"{len(output.answered)} lines are answered already, {num_open} to go")
    return num_open


def _answer(
    args: argparse.Namespace,
    options: Options | None,
    output: BatchOutput,
    num_open: int,
    environment: Mapping[str, str],
) -> None:
    """Answer the open lines with the service that was asked for."""
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
    """Yield the lines that the output has nothing for."""
    yield from (line for line in read_batch(input_file) if line.key not in output.answered)


def _finish(input_file: Path, output: BatchOutput) -> int:
    """Say how the batch as a whole went; returns the exit status."""
    verdicts = [output.answered.get(line.key, False) for line in read_batch(input_file)]
    num_failed = verdicts.count(False)
    _say(
        f"{len(verdicts) - num_failed} of {len(verdicts)} lines have good answers"
        + (f"; the output says of the other {num_failed} what is wrong" if num_failed else "")
    )
    return 1 if num_failed else 0


def _say(text: str) -> None:
    print(f"wideep run-batch: {printable(text)}", file=sys.stderr, flush=True)
