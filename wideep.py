"""WideEP for scripts, `from wideep import LLM, SamplingParams`, and what the command `wideep` runs.

The seven packages have names that others use too (server, moe, ...). The command takes them from the folder that this
file lies in, whatever the current folder, PYTHONPATH or the installed distributions hold. A script's own modules stay
its own: where one of them hides a package of ours, the names below raise an error that says which, and what to do.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they are loaded when a script asks for them: the command has no need of them
    from server.offline import (
        LLM,
        CompletionOutput,
        LLMError,
        Logprob,
        OptionsError,
        RequestOutput,
        SamplingParams,
        ServiceEndedError,
        ServiceLostError,
    )

__all__ = [
    "LLM",
    "CompletionOutput",
    "LLMError",
    "Logprob",
    "OptionsError",
    "RequestOutput",
    "SamplingParams",
    "ServiceEndedError",
    "ServiceLostError",
]
INTERRUPTED = 130  # as shells have it: 128 and SIGINT's number
PIPE_CLOSED = 141  # 128 and SIGPIPE's number
_ROOT = Path(__file__).resolve().parent


def __getattr__(name: str) -> Any:
    """Load a public name from `server.offline`.

    Raises:
        RootError: a package of ours is hidden by another one.
    """
    if name not in __all__:
        raise AttributeError(f"module 'wideep' has no attribute {name!r}; it has {', '.join(__all__)}")
    _roots().check_roots(_ROOT)
    return getattr(importlib.import_module("server.offline"), name)


def rendezvous_handler() -> Callable[[Any], Any]:
    """What torchrun's entry point `torchrun.handlers` asks for: who makes the handler of `--rdzv-backend wideep`."""
    return _create_rendezvous


def _create_rendezvous(params: Any) -> Any:
    _roots().take_first(_ROOT)
    return importlib.import_module("server.process.store.torchrun_backend").create(params)


def main() -> int:
    """Run `wideep` with the process's arguments and return the exit status.

    Ctrl-C that no command handles is 130. A reader that closed our output, as `| head` does, is 141.
    """
    try:
        status = _run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the terminal's ^C
        return INTERRUPTED


def _run() -> int:
    roots = _roots()
    roots.take_first(_ROOT)
    try:
        cli = importlib.import_module("server.cli")
        if not hasattr(
            cli, "build_parser"
        ):  # another's, written over ours, may be imported without complaint
            raise ImportError("it is not WideEP's", name="server.cli")
    except ImportError as error:
        print(f"wideep: {roots.why_broken(error, _ROOT)}", file=sys.stderr)
        return 2
    return int(cli.main())


def _roots() -> ModuleType:
    """Load server/roots.py by its path: the package's name may be another's."""
    spec = importlib.util.spec_from_file_location("wideep_roots", _ROOT / "server" / "roots.py")
    assert spec is not None and spec.loader is not None, "the file is part of WideEP"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
