"""Stand-in for an engine or a front: `fake_child.py engine|front --options JSON FLAGS...`, without torch or a model.

It writes its pid, arguments and environment to ROLE-RANK.json in $FAKE_DIRECTORY, reports what the real process reports, and
waits for SIGTERM, or END_NOW_SIGNAL for a front. Of several fronts, all but the first add their number to the file's name.
FAKE_STUBBORN=1 makes it ignore both. FAKE_EXIT=ROLE-RANK:STATUS makes that process exit with STATUS at once; FAKE_EXIT_AGAIN
does so only after a restart. SIGUSR2 ends an engine like the loss of its front, and SIGUSR1 ends a front with FRONT_FAILED.
FAKE_FRONT_CHILD=1 gives a front a child that dies with it, like the checker of structures, and writes its pid to
front-RANK.child. FAKE_STOPS_WHEN_READY=1 stops an engine between its readiness and its first heartbeat, on its first start only.
Both leave spares like real ones.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from server.machine.parent_death import die_with_parent
from server.serve.children import END_NOW_SIGNAL
from server.serve.rank.loading import LoadingFile, loading_of
from server.serve.spare import ENGINE, FRONT, leave_spare

FACTS = {  # facts that an engine reports
    "model_type": "mixtral", "num_experts": 8, "moe_layers": 2, "layers": 2, "slots_per_rank": 4, "num_slots": 8,
    "dispatch": "shm, as all ranks are on one host", "kv_cache_bytes": 1 << 30, "stored": "",
}  # fmt: skip
KV_CACHE_BYTES = 12345678  # memory that an engine reports as taken


FRONT_IS_GONE = 3  # as in server.serve.rank.engine
FRONT_FAILED = 7


def _have_loaded() -> bool:
    """Return whether all ranks have loaded, if they write their progress."""
    folder = os.environ.get("WIDEEP_SCREEN")
    if folder is None:
        return True
    files = [path.read_text() for path in Path(folder).glob("loading_*.json")]
    return len(files) == int(os.environ["WORLD_SIZE"]) and all(json.loads(text)["facts"] for text in files)


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" and _have_loaded() else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Server(HTTPServer):
    allow_reuse_port = True  # of several fronts


def _serve(port: int, ready_fd: int, number: int) -> None:
    server = _Server(("127.0.0.1", port), _Health)
    told = {
        "http": f"http://127.0.0.1:{server.server_port}",
        "ranks_address": f"x:{1 + number}",
        "token": "t",
    }
    os.write(ready_fd, json.dumps(told).encode() + b"\n")
    server.serve_forever()


def _begin_loading() -> LoadingFile | None:
    """Read a quarter of the weights, if a terminal shows the progress."""
    loading = loading_of(
        int(os.environ["RANK"]), is_restart="WIDEEP_RESTARTS" in os.environ, in_bytes=("weights",),
        environment=os.environ,
    )  # fmt: skip
    if not isinstance(loading, LoadingFile):
        return None
    loading("weights", 1 << 20, 4 << 20)
    return loading


def _report_ready(loading: LoadingFile | None) -> None:
    if loading is not None:
        loading("weights", 4 << 20, 4 << 20)
        for done in range(1, 6):
            loading("kernels, which take their time", done, 5)
        loading.tell(**FACTS)
    front = json.loads(os.environ.get("WIDEEP_FRONT", '{"http": "http://elsewhere:1"}'))
    descriptor = int(os.environ["WIDEEP_READY_FD"])
    for told in ({"http": front["http"]}, {"kv_cache_bytes": KV_CACHE_BYTES}, {"ready": True}):
        os.write(descriptor, json.dumps(told).encode() + b"\n")
    (Path(os.environ["FAKE_DIRECTORY"]) / f"engine-{os.environ['RANK']}.told").touch()
    if os.environ.get("FAKE_STOPS_WHEN_READY") and "WIDEEP_RESTARTS" not in os.environ:
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        os.write(descriptor, b'{"beat": 1}\n')
        time.sleep(0.1)


def _end(name: str) -> Callable[..., None]:
    """Return a handler that records its signal and ends the process."""

    def note_and_end(number: int, _frame: object) -> None:
        (Path(os.environ["FAKE_DIRECTORY"]) / f"{name}.ended-by").write_text(signal.Signals(number).name)
        os._exit(0)

    return note_and_end


def main() -> None:
    while order := leave_spare(os.environ, ENGINE if sys.argv[1] == "engine" else FRONT):
        sys.argv[3] = order.options
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--front-number", type=int, default=0)
    parser.add_argument("--stands-by", action="store_true")
    args, _ = parser.parse_known_args()
    stubborn = os.environ.get("FAKE_STUBBORN") == "1"
    name = f"{args.role}-{os.environ['RANK']}" + (f"-{args.front_number}" if args.front_number else "")
    for number in (signal.SIGTERM, END_NOW_SIGNAL if args.role == "front" else signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if stubborn else _end(name))
    if args.role == "engine":
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(FRONT_IS_GONE))
    else:
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(FRONT_FAILED))
    wanted = (
        "WIDEEP_FRONT",
        "OMP_NUM_THREADS",
        "WIDEEP_API_KEY",
        "WIDEEP_RESTARTS",
        "WIDEEP_KEPT",
        "WIDEEP_STANDBY",
        "WIDEEP_NODE_FRONTS",
        "WIDEEP_LISTENER_FD",
    )
    known = {"pid": os.getpid(), "argv": sys.argv[1:], "env": {key: os.environ.get(key) for key in wanted}}
    partial = Path(os.environ["FAKE_DIRECTORY"]) / f"{name}.partial"
    partial.write_text(json.dumps(known))
    partial.rename(partial.with_suffix(".json"))
    loading = _begin_loading() if args.role == "engine" else None
    variable = "FAKE_EXIT_AGAIN" if "WIDEEP_RESTARTS" in os.environ else "FAKE_EXIT"
    victim, _, status = os.environ.get(variable, "").partition(":")
    if victim == name:
        sys.exit(int(status))
    if args.role == "front":
        if "FAKE_FRONT_CHILD" in os.environ:
            pid = os.getpid()
            child = subprocess.Popen(["sleep", "600"], preexec_fn=lambda: die_with_parent(parent_pid=pid))
            partial.write_text(str(child.pid))
            partial.rename(partial.with_suffix(".child"))
        _serve(args.options.get("port", 0), int(os.environ["WIDEEP_READY_FD"]), args.front_number)
    else:
        _report_ready(loading)


if __name__ == "__main__":
    main()
