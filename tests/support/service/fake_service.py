"""Run the real serve or worker with fake engines and fronts: `fake_service.py serve|worker MODEL FLAGS...`.

FAKE_LAUNCHER=1 omits torch's store. `forked` runs it in a process that has imported this module.

A worker writes its pid to $FAKE_DIRECTORY/worker-RANK.json, like the fake children.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

import server.serve.preflight.checks  # noqa: E402
from server.cli import build_parser  # noqa: E402
from server.options.reading import options_from  # noqa: E402
from server.serve.serve import ServeCommands, run_serve  # noqa: E402
from server.serve.supervisor import Commands  # noqa: E402
from server.serve.worker import run_worker  # noqa: E402

_CHILD = (sys.executable, str(Path(__file__).with_name("fake_child.py")))


def main() -> int:
    checks: Any = server.serve.preflight.checks
    checks.available_bytes = lambda: 1 << 40  # fakes are small, also on a full machine
    options = options_from(build_parser(sys.argv[1]).parse_args(sys.argv[1:]))
    if sys.argv[1] == "serve":
        commands = ServeCommands(worker=(sys.executable, __file__, "worker"))
        if os.environ.get("FAKE_LAUNCHER") == "1":
            commands = replace(
                commands, agent=(sys.executable, str(Path(__file__).with_name("fake_launcher.py")))
            )
        return run_serve(options, commands=commands)
    assert "torch" not in sys.modules, "the worker imported torch"
    partial = Path(os.environ["FAKE_DIRECTORY"]) / f"worker-{os.environ.get('RANK')}.partial"
    partial.write_text(json.dumps({"pid": os.getpid(), "ppid": os.getppid()}))
    partial.rename(partial.with_suffix(".json"))
    return run_worker(options, commands=Commands(engine=(*_CHILD, "engine"), front=(*_CHILD, "front")))


if __name__ == "__main__":
    sys.exit(main())
