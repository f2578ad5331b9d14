"""WideEP for scripts (`from wideep import LLM, SamplingParams`) and the entry point of the command `wideep`.

The seven packages have generic names (server, moe, ...). The command imports them from the folder of this file, regardless
of the current folder, PYTHONPATH and installed distributions. A script keeps its own modules: if one of them hides a
package of WideEP, the names below raise an error that names it and explains the fix.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # loaded on first use by a script: the command does not need them
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
INTERRUPTED = 130  # shells' convention: 128 plus the number of SIGINT
PIPE_CLOSED = 141  # 128 plus the number of SIGPIPE
_ROOT = Path(__file__).resolve().parent


def __getattr__(name: str) -> Any:
    """Load a public name from `server.offline`.

    Raises:
        RootError: Another package hides one of WideEP's.
    """
    if name not in __all__:
        raise AttributeError(f"module 'wideep' has no attribute {name!r}; it has {', '.join(__all__)}")
    _roots().check_roots(_ROOT)
    return getattr(importlib.import_module("server.offline"), name)


def rendezvous_handler() -> Callable[[Any], Any]:
    """Return the factory for `--rdzv-backend wideep`, for torchrun's entry point `torchrun.handlers`."""
    return _create_rendezvous


def _create_rendezvous(params: Any) -> Any:
    _roots().take_first(_ROOT)
    return importlib.import_module("server.serve.store.torchrun_backend").create(params)


def main() -> int:
    """Run `wideep` with the process's arguments and return the exit status.

    The status is 130 after an unhandled Ctrl-C, and 141 if the reader closed the output, as `| head` does.
    """
    try:
        status = _run()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        return PIPE_CLOSED
    except KeyboardInterrupt:
        print(file=sys.stderr)  # after the terminal's ^C
        return INTERRUPTED


def _run() -> int:
    roots = _roots()
    roots.take_first(_ROOT)
    try:
        cli = importlib.import_module("server.cli")
        # Files of another package, written over WideEP's, may import without an error.
        if not hasattr(cli, "build_parser"):
            raise ImportError("the file is not WideEP's", name="server.cli")
    except ImportError as error:
        print(f"wideep: {roots.why_broken(error, _ROOT)}", file=sys.stderr)
        return 2
    return int(cli.main())


def _roots() -> ModuleType:
    """Load server/machine/roots.py by its path: the package name may belong to another package."""
    spec = importlib.util.spec_from_file_location("wideep_roots", _ROOT / "server" / "machine" / "roots.py")
    assert spec is not None and spec.loader is not None, "the file is part of WideEP"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
