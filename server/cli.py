"""`wideep`: parse the command line and run the requested command.

Each command is a record (`Command`). Its module is imported when it runs, for startup time: `wideep --help` takes a tenth of a
second, and the supervisor never loads torch, fastapi or transformers. The commands `engine` and `front`, and the programs that
are not commands (`_PROGRAMS`, `claim`, `launcher`), are internal and hidden from the help.
"""

import argparse
import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from server.clients.autoscale.flags import AUTOSCALE
from server.clients.batch.flags import RUN_BATCH
from server.clients.commands import CHAT, DRAIN, LORA, MODELS, POOLS, SCALE, STATUS
from server.clients.experts.cli import EXPERTS
from server.clients.url_flag import DEFAULT_URL
from server.machine.lines import say, write_lines_as, write_times
from server.machine.roots import RootError, check_roots
from server.machine.versions import VersionError, check_transformers, version_of, why_unfit
from server.options.command import PLANNING, SERVING, USING, Command, run_named
from server.options.flag import OptionsError
from server.options.reading import nearest, notes_on
from server.options.table import Options
from server.options.words import spelled, why_unknown
from server.serve.commands import ENGINE, FRONT, SERVE, WORKER
from server.tools.bench.flags import BENCH
from server.tools.completion import SHELLS, completion_script
from server.tools.doctor.flags import DOCTOR
from server.tools.simulate.flags import SIMULATE
from server.tools.size.flags import SIZE

_PROGRAMS = {
    "structure-checker": "server.front.structure.checker_process:run_checker",
    "weight-receiver": "server.serve.weight_receiver:run_receiver",
    "image-encoder": "server.front.images.encoder_process:run_encoder",
    "dispatch-trial": "server.tools.doctor.dispatch_trial:run_dispatch_trial",
}
_DESCRIPTION = """\
Serve Mixture-of-Experts language models with expert parallelism on any number of ranks.
"""
_EXAMPLES = """\
examples:
  wideep serve                         generate the demo model once and serve it on 2 ranks at 127.0.0.1:8000
  wideep serve ./Qwen3-30B-A3B -dp 4   serve a Hugging Face directory on 4 ranks
  wideep doctor                        check this machine, or several nodes, before a start
  wideep chat                          chat with the service in the terminal
  wideep models qwen3_next gemma4      check whether models of these types run, and why not
  wideep size config.json --device h200  estimate memory, step times and the ranks that a target needs
  wideep run-batch -i in.jsonl -o out.jsonl  answer a file of requests (OpenAI's batch format)
  wideep bench --concurrency 1,4,16    measure throughput and latency under load
  wideep experts load                  show the load of the experts, live
  wideep simulate TRACE --model DIR -dp 256  simulate many ranks on a trace of requests
  wideep experts simulate LOADFILE ...  compare policies and redundancy on a recorded load

`wideep COMMAND --help` explains a command.
"""
_COMPLETION_EXAMPLE = """\
example, in ~/.bashrc (for zsh: in ~/.zshrc, with zsh):
  eval "$(wideep completion bash)"
"""


class _Parser(argparse.ArgumentParser):
    """A parser with short error messages. It accepts no abbreviated flags: a new flag could make one ambiguous."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        """Print the error in one sentence and exit with status 2."""
        self.exit(
            2, f"{self.prog}: {message.removeprefix('argument ')}; `{self.prog} --help` lists its flags\n"
        )


def _add_shell(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar=f"{{{','.join(SHELLS)}}}")


def run_completion(args: argparse.Namespace) -> int:
    """Print the completion script of a shell."""
    print(completion_script(args.shell, build_parser(), _SHOWN), end="")
    return 0


_COMPLETION = Command(
    name="completion",
    group=PLANNING,
    help="print the shell completion script",
    description="Print a script that completes commands, flags and values in a shell.",
    examples=_COMPLETION_EXAMPLE,
    add_flags=_add_shell,
    run="server.cli:run_completion",
)
_COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        *(SERVE, WORKER, CHAT, RUN_BATCH, EXPERTS, BENCH, STATUS, DRAIN, SCALE, AUTOSCALE, POOLS, LORA),
        *(DOCTOR, MODELS, SIZE, SIMULATE, _COMPLETION),
        *(ENGINE, FRONT),
    )
}
_SHOWN = tuple(name for name, command in _COMMANDS.items() if command.group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `wideep` with these arguments (default: the process's) and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launcher"]:  # the launcher parses its own flags
        _run_launcher(words[1:])
    if words[:1] == ["claim"]:
        return int(run_named("server.serve.store.claim:run_claim", words[1:]))
    if len(words) == 1 and words[0] in _PROGRAMS:
        return int(run_named(_PROGRAMS[words[0]]))
    try:
        args = _parse(words)
    except OptionsError as error:
        print(error, file=sys.stderr)
        return 2
    if args.command is None:
        build_parser().print_help()
        return 2
    try:
        return _run(args)
    except (OptionsError, RootError) as error:
        print(f"wideep {args.command}: {error}", file=sys.stderr)
        return 2
    except VersionError as error:
        print(f"wideep {args.command}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        if (why := why_unfit(error)) is None:
            raise
        print(f"wideep {args.command}: {why}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    """Run a command: check the versions and the arguments, log the flags without effect, call the command's function."""
    command = _COMMANDS[args.command]
    check_roots()
    note = check_transformers() if command.needs_transformers else None
    prepared = command.prepare(args)
    if isinstance(prepared[0], Options):  # a process of a service
        write_lines_as(prepared[0].log.format)
        if command is not SERVE:
            write_times()
    # Of several workers on a node, only the first one logs.
    if command.takes_options and os.environ.get("LOCAL_RANK", "0") == "0":
        for line in (*([note] if note else []), *notes_on(args)):
            say(f"wideep {command.name}: {line}", error=True, level="info")
    return int(run_named(args.run, *prepared))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the process.

    Raises:
        OptionsError: A command or flag is unknown. The message begins with the command.
    """
    name = next(iter(words), "-")
    parser, parsers = _build_parsers(name if name in _COMMANDS else None)
    if not name.startswith("-") and name not in _COMMANDS:
        raise OptionsError(
            f"wideep: {name!r} is not a command{nearest(name, _SHOWN)}; the commands are {', '.join(_SHOWN)}"
        )
    # WideEP itself writes the command lines of internal processes, so they need no correction.
    is_service = name in _SHOWN and _COMMANDS[name].takes_options
    args, left = parser.parse_known_args([name, *spelled(words[1:])] if is_service else words)
    # argparse does not look for an optional argument behind a flag: `wideep drain 1 --undo URL`.
    if len(left) == 1 and "://" in left[0] and vars(args).get("url") == DEFAULT_URL:
        args.url, left = left[0], []
    if left:
        shown = f"wideep {name}" if name in parsers else "wideep"
        own = () if is_service else re.findall(r"--[\w-]+", parsers.get(name, parser).format_help())
        raise OptionsError(f"{shown}: {why_unknown(left, shown, own)}")
    return args


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands, with the flags of one or of all. Later calls return the same one."""
    return _build_parsers(only)[0]


@functools.cache
def _build_parsers(
    only: str | None,
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of all commands, and the parsers of the single commands by name.

    Args:
        only: The command that has flags, since those of a service take 20 ms; None: all have them.
    """
    parser = _Parser(
        prog="wideep",
        usage="wideep [-h] [--version] COMMAND ...",
        description=f"{_DESCRIPTION}\n{_groups_text()}",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--version", action="version", version=f"wideep {version_of('wideep') or '(not installed)'}"
    )
    parsers = parser.add_subparsers(
        prog="wideep", dest="command", metavar="COMMAND", help=argparse.SUPPRESS, parser_class=_Parser
    )
    for command in _COMMANDS.values():
        own: argparse.ArgumentParser = parsers.add_parser(
            command.name,
            usage=command.usage,
            description=command.description,
            epilog=command.examples or None,
            add_help=not command.has_own_help,
        )
        own.set_defaults(run=command.run)
        if only in (None, command.name):
            command.add_flags(own)
    return parser, parsers.choices


def _groups_text() -> str:
    """Return the commands of `wideep --help` under their headings."""
    lines = []
    for group in (SERVING, USING, PLANNING):
        lines.append(f"{group}:")
        lines += [f"  {each.name:12}{each.help}" for each in _COMMANDS.values() if each.group == group]
        lines.append("")
    return "\n".join(lines)


def _run_launcher(arguments: list[str]) -> NoReturn:
    write_times()
    status = run_named("server.serve.launcher:run_launcher", arguments)
    sys.stdout.flush()
    os._exit(status)  # skips unloading torch, which takes seconds on a busy machine
