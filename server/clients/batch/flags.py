"""The flags of `wideep run-batch`; `run_batch` runs it. It has no heavy imports, because `wideep --help` needs it."""

import argparse
from pathlib import Path
from typing import Any

from server.options.command import USING, Command
from server.options.flag import OptionsError
from server.options.reading import PRIVATE_DEFAULTS, add_options, options_from, said_in

_EXAMPLES = """\
examples:
  wideep run-batch -i in.jsonl -o out.jsonl --model ./Qwen3-30B-A3B -dp 4
  wideep run-batch -i in.jsonl -o out.jsonl --url http://127.0.0.1:8000

a line of in.jsonl:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
   "body": {"model": "demo", "messages": [{"role": "user", "content": "Hello!"}]}}

Repeat the command to continue an interrupted batch. The exit status is 0 if every line has a good answer.
"""


def _add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    add = group.add_argument
    add("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one JSON per line")
    add(
        "-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, appended line by line"
    )
    add("--url", metavar="URL", help="send the requests to this service instead of starting one")
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="number of concurrent requests (default: as many as the private service runs at once, 64 with --url)",
    )
    add_options(parser, PRIVATE_DEFAULTS)


def _check(args: argparse.Namespace) -> None:
    """Check the flags of run-batch itself.

    Raises:
        OptionsError: A flag is invalid; the message names it.
    """
    if args.concurrency is not None and not 1 <= args.concurrency <= 4096:
        raise OptionsError(f"--concurrency is {args.concurrency}; it must be 1 to 4096")
    if args.input_file.resolve() == args.output_file.resolve():
        raise OptionsError("-i and -o name the same file; answers would be read as requests")
    if args.url is not None:
        _refuse_serve_flags(args)


def _refuse_serve_flags(args: argparse.Namespace) -> None:
    """Refuse flags that --url would silently ignore, because it does not start a service."""
    for name in said_in(args):
        if name != "api_key":
            shown = "MODEL" if name == "model" else f"--{name.lstrip('-').replace('_', '-')}"
            raise OptionsError(f"{shown} is for a service that run-batch starts; --url uses a running one")


def _prepare(args: argparse.Namespace) -> tuple[Any, ...]:
    _check(args)
    return args, None if args.url else options_from(args, defaults=PRIVATE_DEFAULTS)


RUN_BATCH = Command(
    name="run-batch",
    help="answer a file of requests, in OpenAI's batch format",
    description="Answer a file of requests with a private service, or with a running one (--url).",
    examples=_EXAMPLES,
    usage="wideep run-batch -i FILE -o FILE [MODEL] [FLAGS]",
    add_flags=_add_flags,
    group=USING,
    prepare=_prepare,
    run="server.clients.batch.run:run_batch",
    takes_options=True,
)
