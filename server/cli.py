"""`wideep`: parse the command line and run the requested command.

Each command's module is imported when the command is dispatched (an exception to rule 8 of the house style, for startup
time): `wideep --help` takes a tenth of a second, and the supervisor never loads torch, fastapi or transformers. `engine`,
`front`, `structure-checker`, `dispatch-trial`, `claim` and `launcher` are internal and hidden from the help.
"""
# ruff: noqa: PLC0415

import argparse
import importlib.metadata
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from server.clients.batch.flags import add_batch_parser, check_batch_arguments
from server.clients.experts.cli import add_experts_parser
from server.clients.url_flag import add_url
from server.machine.lines import say, write_lines_as, write_times
from server.machine.roots import RootError, check_roots
from server.machine.versions import VersionError, check_transformers, why_unfit
from server.options.flag import OptionsError
from server.options.help import HelpAction
from server.options.reading import PRIVATE_DEFAULTS, add_options, nearest, notes_on, options_from
from server.options.table import Options
from server.options.words import spelled, why_unknown
from server.tools.bench.flags import add_bench_parser
from server.tools.completion import SHELLS, completion_script
from server.tools.doctor.flags import add_doctor_parser, check_doctor_arguments
from server.tools.simulate.flags import add_simulate_parser
from server.tools.size.flags import add_size_parser

_COMMANDS = (
    "serve",
    "worker",
    "doctor",
    "size",
    "simulate",
    "chat",
    "models",
    "run-batch",
    "bench",
    "experts",
    "completion",
)  # shown by --help
_BUILDING_MODELS = ("serve", "worker", "models", "size", "simulate")  # need transformers
_SERVICES = ("serve", "worker", "run-batch", "doctor")  # take a service's flags
_MOST_TEMPERATURE = 2.0  # OpenAI's limit, and the service's
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
_SERVE_EXAMPLE = """\
example:
  wideep serve ./OLMoE-1B-7B --data-parallel-size 4 --port 8080 --served-model-name olmoe --max-model-len 4096
"""
_WORKER_EXAMPLE = """\
example, the same line on both of two nodes; HEAD is one of them and serves HTTP:
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend wideep --rdzv-endpoint HEAD:29400 \\
      --no-python wideep worker ./Qwen3-30B-A3B --host 0.0.0.0
"""
_CHAT_EXAMPLE = """\
example:
  wideep chat http://127.0.0.1:8000
  wideep chat --system "You answer in one sentence." --temperature 0
"""
_COMPLETION_EXAMPLE = """\
example for ~/.bashrc (for zsh, use `zsh` in ~/.zshrc):
  eval "$(wideep completion bash)"
"""


class _Parser(argparse.ArgumentParser):
    """A parser with short error messages, without abbreviations, whose meaning would change as flags are added."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **keywords)

    def error(self, message: str) -> NoReturn:
        """Print the error in one sentence and exit with status 2."""
        self.exit(
            2, f"{self.prog}: {message.removeprefix('argument ')}; `{self.prog} --help` lists its flags\n"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `wideep` with these arguments (default: the process's) and return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["launcher"]:  # the launcher parses its own flags
        _run_launcher(words[1:])
    if words == ["structure-checker"]:
        return _run_checker()
    if words == ["dispatch-trial"]:
        return _run_trial()
    if words[:1] == ["claim"]:
        return _run_claim(words[1:])
    try:
        args = _parse(words)
    except OptionsError as error:
        print(error, file=sys.stderr)
        return 2
    if args.command is None:
        build_parser().print_help()
        return 2
    try:
        check_roots()
        version_note = check_transformers() if args.command in _BUILDING_MODELS else None
        if args.command == "chat":
            return _run_chat(args)
        if args.command == "models":
            return _run_models(args)
        if args.command == "size":
            return _run_size(args)
        if args.command == "experts":
            return _run_experts(args)
        if args.command == "simulate":
            return _run_simulate(args)
        if args.command == "completion":
            print(completion_script(args.shell, build_parser(), _COMMANDS), end="")
            return 0
        if args.command == "run-batch":
            return _run_batch(args)
        if args.command == "bench":
            return _run_bench(args)
        if args.command == "doctor":
            return _run_doctor(args)
        options = options_from(args)
        write_lines_as(options.log.format)
        if args.command != "serve":
            write_times()
        _say_notes(args, *([version_note] if version_note else []))
        return _run_service(args, options)
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


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of the process.

    Raises:
        OptionsError: A command or flag is unknown. The message begins with the command.
    """
    parser, commands = _build_parsers()
    command = next(iter(words), "-")
    if not command.startswith("-") and command not in commands:
        raise OptionsError(
            f"wideep: {command!r} is not a command{nearest(command, _COMMANDS)}; the commands are {', '.join(_COMMANDS)}"
        )
    is_service = command in _SERVICES
    args, left = parser.parse_known_args([command, *spelled(words[1:])] if is_service else words)
    if left:
        shown = f"wideep {command}" if command in commands else "wideep"
        own = () if is_service else re.findall(r"--[\w-]+", commands.get(command, parser).format_help())
        raise OptionsError(f"{shown}: {why_unknown(left, shown, own)}")
    return args


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    return _build_parsers()[0]


def _build_parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of all commands, and the parsers of the single commands by name."""
    parser = _Parser(prog="wideep", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", action="version", version=f"wideep {_version()}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Parser
    )
    serve = commands.add_parser(
        "serve",
        help="serve a model on this machine",
        description="Serve a model on this machine: check it, start the ranks, report when they are ready, stop them.",
        epilog=_SERVE_EXAMPLE,
        add_help=False,
    )
    worker = commands.add_parser(
        "worker",
        help="run one rank of a multi-node service (started by torchrun)",
        description="Run one rank of a service on several nodes. torchrun starts it, once per device.",
        epilog=_WORKER_EXAMPLE,
        add_help=False,
    )
    engine = commands.add_parser("engine", description="The engine of one rank; started by `wideep worker`.")
    front = commands.add_parser("front", description="HTTP and the router; started by `wideep worker`.")
    for command in (serve, worker):
        command.add_argument("-h", "--help", action=HelpAction)
    for command in (serve, worker, engine, front):
        command.usage = f"{command.prog} [MODEL] [FLAGS]"
        add_options(command)
    front.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks that will attach")
    front.add_argument(
        "--ready-fd", type=int, metavar="FD", help="file descriptor to write the addresses to, as a JSON line"
    )
    front.add_argument(
        "--ranks-host", default="127.0.0.1", help="address for ranks to attach to (default: %(default)s)"
    )
    chat = commands.add_parser(
        "chat",
        help="chat with a served model in the terminal",
        description="Chat with a served model in the terminal.",
        epilog=_CHAT_EXAMPLE,
    )
    add_url(chat)
    chat.add_argument(
        "--api-key", metavar="KEY", help="API key (default: WIDEEP_API_KEY, then OPENAI_API_KEY)"
    )
    chat.add_argument("--model", metavar="NAME", help="name of the served model (default: the first)")
    chat.add_argument("--system", metavar="TEXT", help="system prompt of the conversation")
    chat.add_argument(
        "--temperature", type=_temperature, metavar="T", help="0 to 2 (default: the service's for the model)"
    )
    models = commands.add_parser(
        "models",
        help="list the supported model types, and why others are not supported",
        description="Report for each Mixture-of-Experts type of the installed transformers whether a service would start with it.",
    )
    models.add_argument(
        "types", nargs="*", metavar="TYPE", help="model types (default: all, which takes about two minutes)"
    )
    add_doctor_parser(commands)
    add_size_parser(commands)
    add_batch_parser(commands)
    add_bench_parser(commands)
    add_experts_parser(commands)
    add_simulate_parser(commands)
    completion = commands.add_parser(
        "completion",
        help="print the shell completion script",
        description="Print a script that completes commands, flags and values in a shell.",
        epilog=_COMPLETION_EXAMPLE,
    )
    completion.add_argument("shell", choices=SHELLS, metavar=f"{{{','.join(SHELLS)}}}")
    return parser, commands.choices


def _say_notes(args: argparse.Namespace, *more: str) -> None:
    """Log the flags that have no effect, and why; of several workers on a node, only the first one does."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for note in (*more, *notes_on(args)):
            say(f"wideep {args.command}: {note}", error=True, level="info")


def _version() -> str:
    try:
        return importlib.metadata.version("wideep")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "(not installed)"


def _temperature(text: str) -> float:
    """Read the value of --temperature."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_TEMPERATURE:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to {_MOST_TEMPERATURE:g}")
    return value


def _run_service(args: argparse.Namespace, options: Options) -> int:
    if args.command == "serve":
        from server.serve.serve import run_serve

        return run_serve(options)
    if args.command == "worker":
        from server.serve.worker import run_worker

        return run_worker(options)
    if args.command == "engine":
        from server.serve.engine import run_engine

        return run_engine(options)
    from server.serve.front_main import run_front

    return run_front(options, num_ranks=args.ranks, ready_fd=args.ready_fd, ranks_host=args.ranks_host)


def _run_chat(args: argparse.Namespace) -> int:
    from server.clients.chat import run_chat

    return run_chat(args)


def _run_models(args: argparse.Namespace) -> int:
    from server.clients.models import run_models

    return run_models(args)


def _run_size(args: argparse.Namespace) -> int:
    from server.tools.size.inputs import resolve_inputs

    args = resolve_inputs(args)
    from server.tools.size.size import run_size

    return run_size(args)


def _run_batch(args: argparse.Namespace) -> int:
    from server.clients.batch.run import run_batch

    check_batch_arguments(args)
    _say_notes(args)
    return run_batch(args, None if args.url else options_from(args, defaults=PRIVATE_DEFAULTS))


def _run_bench(args: argparse.Namespace) -> int:
    from server.tools.bench.run import run_bench

    return run_bench(args)


def _run_doctor(args: argparse.Namespace) -> int:
    from server.tools.doctor.run import run_doctor

    check_doctor_arguments(args)
    options = options_from(args)
    _say_notes(args)
    return run_doctor(args, options)


def _run_experts(args: argparse.Namespace) -> int:
    if args.verb in ("load", "record"):
        from server.clients.experts.live import run_live

        return run_live(args)
    if args.verb in ("apply", "rollback", "history"):
        from server.clients.experts.change import run_change

        return run_change(args)
    from server.clients.experts.offline import run_experts

    return run_experts(args)


def _run_simulate(args: argparse.Namespace) -> int:
    from server.tools.size.inputs import resolve_inputs

    if not args.trace.is_file():
        raise OptionsError(f"the trace {args.trace} is not a file")
    args = resolve_inputs(args)
    from server.tools.simulate.run import run_simulate

    return run_simulate(args)


def _run_claim(words: Sequence[str]) -> int:
    from server.serve.store.claim import run_claim

    return run_claim(words)


def _run_checker() -> int:
    from server.front.structure.checker_process import run_checker

    return run_checker()


def _run_trial() -> int:
    from server.tools.doctor.dispatch_trial import run_dispatch_trial

    return run_dispatch_trial()


def _run_launcher(arguments: list[str]) -> NoReturn:
    from server.serve.launcher import run_launcher

    write_times()
    status = run_launcher(arguments)
    sys.stdout.flush()
    os._exit(status)  # skips unloading torch, which takes seconds on a busy machine
