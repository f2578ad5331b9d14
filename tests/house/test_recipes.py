"""The recipes of docs/recipes agree with the program in flags, ports, paths, times and files. No daemon is needed."""

import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from server.cli import build_parser
from server.http.observability.metrics import Metrics
from server.http.observability.ops import ops_routes
from server.options.pools import Pool, Role
from server.options.reading import options_from
from server.options.table import Options
from server.serve.store.rendezvous import rendezvous_endpoint
from server.serve.supervisor import DRAIN_GRACE_S
from tests.support.service.recipes import (
    COMPOSE,
    LEADER_WORKER_SET,
    RECIPES,
    SBATCH,
    UNITS,
    NodeCommand,
    compose_nodes,
    kubernetes_nodes,
    load,
    pods,
    unit_command,
    unit_lines,
)

ROOT = RECIPES.parents[1]
DOCKERFILES = sorted((RECIPES / "docker").glob("Dockerfile*"))
RENDEZVOUS_PORT = 29400
NODES = {
    "compose": lambda: compose_nodes({}),
    "kubernetes": lambda: kubernetes_nodes({"LWS_LEADER_ADDRESS": "leader"}, size=3),
    "systemd": lambda: [
        unit_command("wideep-node.service", "node.env", {"NODE_RANK": str(at)}) for at in range(2)
    ],
}


parser = functools.cache(build_parser)


def read_node() -> ModuleType:
    """Import the program node.py as a module."""
    spec = importlib.util.spec_from_file_location("wideep_node", RECIPES / "node.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Return node.py with a node 0 that has joined but does not serve HTTP yet."""
    module = read_node()
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(module, "why_closed", lambda _host, _port: None)
    monkeypatch.setattr(module, "answers", lambda _url: False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return module


def torchrun(node: ModuleType, command: NodeCommand, key: Path) -> list[str]:
    """Return the command that a recipe's node runs. The cluster key is here, and HEAD is this machine."""
    key.write_text("5ec2e7" * 11)
    key.chmod(0o600)
    environment = {**command.environment, "HEAD": "localhost"}
    if "CLUSTER_KEY_SECRET" in environment:
        environment["CLUSTER_KEY_SECRET"] = str(key)
    verb, *words = command.words[command.words.index("wideep-node") + 1 :]
    assert verb == "start"
    return [
        str(key) if word == "/etc/wideep/cluster.key" else word for word in node.torchrun(words, environment)
    ]


def options_of(words: list[str]) -> Options:
    """Return the options of a `wideep` command line, with or without a torchrun before it."""
    return options_from(parser().parse_args(words[len(words) - words[::-1].index("wideep") :]), {})


@pytest.mark.parametrize("recipe", NODES)
@pytest.mark.parametrize("runs", [False, True], ids=["at the start", "while the service runs"])
def test_a_node_becomes_a_command_that_torchrun_and_wideep_take(
    node: ModuleType, tmp_path: Path, recipe: str, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "answers", lambda url: runs and url.endswith("/ping"))
    commands = NODES[recipe]()
    for rank, command in enumerate(commands):
        words = torchrun(node, command, tmp_path / "key")
        joins = runs and rank > 0
        assert rendezvous_endpoint(words, {}) == ("localhost", 0 if joins else RENDEZVOUS_PORT)
        assert words[words.index("--nnodes") + 1] == ("1" if joins else str(len(commands)))
        assert words[words.index("--local-addr") + 1] == "localhost" or not joins
        assert joins or words[words.index("--rdzv-conf") + 1] == f"is_host={int(rank == 0)}"
        get_args_parser().parse_args(words[1:])
        options = options_of(words)
        assert (options.host, options.port) == ("0.0.0.0", Options().port)
        assert options.join == (f"localhost:{RENDEZVOUS_PORT}" if joins else None)
        assert options.cluster_key is not None


@pytest.mark.parametrize("recipe", NODES)
def test_nodes_with_roles_are_pools_that_join_that_of_node_0_at_every_start(
    node: ModuleType, tmp_path: Path, recipe: str
) -> None:
    commands = NODES[recipe]()
    roles = ["prefill", "decode", "decode"][: len(commands)]
    for rank, (command, role) in enumerate(zip(commands, roles, strict=True)):
        assert command.environment["ROLES"] == "", "by default, all nodes are one pool"
        command.environment["ROLES"] = " ".join(roles)
        words = torchrun(node, command, tmp_path / "key")
        get_args_parser().parse_args(words[1:])
        joins = rank > 0
        assert rendezvous_endpoint(words, {}) == ("localhost", 0 if joins else RENDEZVOUS_PORT)
        assert words[words.index("--nnodes") + 1] == "1"
        options = options_of(words)
        assert options.pools_among(1) == (Pool(f"{role}-{rank}", Role(role), 0, 1),)
        assert options.join == (f"localhost:{RENDEZVOUS_PORT}" if joins else None)


def test_the_units_and_images_of_one_machine_start_what_wideep_takes(tmp_path: Path) -> None:
    options = options_of(unit_command("wideep.service", "wideep.env", {"MODEL": str(tmp_path)}).words)
    assert (options.host, options.port) == ("127.0.0.1", Options().port)
    for path in DOCKERFILES:
        entry, words = (json.loads(instructions(path)[name][-1]) for name in ("ENTRYPOINT", "CMD"))
        options = options_of([*entry, *words])
        assert (options.host, options.device) == ("0.0.0.0", "cuda" if path.suffix else "auto")


def test_a_node_waits_for_node_0_and_says_that_it_is_missing(
    node: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reasons = iter(["Connection refused"] * 3)
    monkeypatch.setattr(node, "why_closed", lambda _host, _port: next(reasons, None))
    words = node.torchrun(["model"], {"NODES": "2", "NODE_RANK": "1", "HEAD": "localhost"})
    assert "--join" not in words
    said = capsys.readouterr().err
    assert said.count("node 0 is missing: nothing answers at localhost:29400 (Connection refused)") == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"NODE_RANK": "2"}, "NODE_RANK is 2; of 2 nodes it is 0 to 1"),
        ({"NODES": ""}, "NODES is ''; it must be a number"),
        ({"RANKS_PER_NODE": "eight"}, "RANKS_PER_NODE is 'eight'; it must be a number"),
        ({"HEAD": ""}, "HEAD is not set; see docs/deploy.md"),
        ({"ROLES": "prefill"}, "ROLES has 1 roles, but NODES is 2; give each node one"),
    ],
)
def test_a_variable_that_is_missing_or_wrong_is_named(
    node: ModuleType, changed: dict[str, str], said: str
) -> None:
    with pytest.raises(SystemExit, match=re.escape(said)):
        node.torchrun(["model"], {"NODES": "2", "NODE_RANK": "0", "HEAD": "localhost", **changed})


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False), (None, False)])
def test_health_has_status_0_while_the_service_answers_with_200(status: int | None, is_healthy: bool) -> None:
    class Front(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" and status else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Front) as front:
        port = str(front.server_port)
        if status is not None:
            threading.Thread(target=front.handle_request, daemon=True).start()
        else:
            front.server_close()
        command = [sys.executable, str(RECIPES / "node.py"), "health"]
        ended = subprocess.run(command, env={**os.environ, "HTTP_PORT": port}, timeout=30, check=False)
    assert (ended.returncode == 0) == is_healthy


def test_ports_are_the_programs_defaults() -> None:
    http_port = Options().port
    for path in DOCKERFILES:
        assert instructions(path)["EXPOSE"] == [f"{http_port} {RENDEZVOUS_PORT}"]
    services = load(COMPOSE)["services"]
    assert services["node0"]["ports"] == [f"127.0.0.1:{http_port}:{http_port}"]
    (container,) = pods(1)[0]["containers"]
    assert container["ports"] == [{"name": "http", "containerPort": http_port}]
    service, monitor = (
        load(LEADER_WORKER_SET.with_name(f"{name}.yaml")) for name in ("service", "servicemonitor")
    )
    assert service["spec"]["ports"] == [{"name": "http", "port": http_port, "targetPort": "http"}]
    assert monitor["spec"]["endpoints"][0]["port"] == "http"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


def test_probes_ask_for_what_the_service_answers() -> None:
    paths = {route.path for route in ops_routes("0", Metrics("m", 1), lambda: None).routes}  # type: ignore[attr-defined]
    leader, worker = (pod["containers"][0] for pod in pods(2))
    probes = {name: probe for name, probe in leader.items() if name.endswith("Probe")}
    assert probes.keys() == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert all(probe["httpGet"]["path"] in paths for probe in probes.values())
    assert load(LEADER_WORKER_SET.with_name("servicemonitor.yaml"))["spec"]["endpoints"][0]["path"] in paths
    assert worker["readinessProbe"]["exec"]["command"] == ["wideep-node", "health"]
    assert "livenessProbe" not in worker, "a worker serves no HTTP"
    for path in DOCKERFILES:
        assert instructions(path)["HEALTHCHECK"][0].endswith('CMD ["wideep-node", "health"]')


def test_everyone_waits_longer_for_the_end_than_open_requests_have(node: ModuleType) -> None:
    drain_s = Options().http.shutdown_timeout_s
    assert node.KILL_MARGIN_S > DRAIN_GRACE_S
    needed_s = drain_s + node.KILL_MARGIN_S
    for service in load(COMPOSE)["services"].values():
        assert int(service["stop_grace_period"].removesuffix("s")) > needed_s
    for pod in pods(2):
        (container,) = pod["containers"]
        _, pause = container["lifecycle"]["preStop"]["exec"]["command"]
        assert {"name": "DRAIN_SECONDS", "value": f"{drain_s:g}"} in container["env"]
        assert pod["terminationGracePeriodSeconds"] >= int(pause) + needed_s
    for unit in UNITS.glob("*.service"):
        lines = unit_lines(unit.name)
        (stop,) = (line for line in lines if line.startswith("TimeoutStopSec="))
        assert int(stop.partition("=")[2]) > needed_s
        assert "KillMode=mixed" in lines, "without it engines get the signal too and end at once"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_has_a_pinned_base_a_user_of_its_own_and_hands_signals_on(path: Path) -> None:
    said = instructions(path)
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-\w+( AS \w+)?", base) for base in said["FROM"])
    assert said["USER"] == [str(pods(1)[0]["securityContext"]["runAsUser"]) + ":10001"]
    assert json.loads(said["ENTRYPOINT"][0])[:2] == ["tini", "--"]


def test_the_image_is_built_from_all_packages() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages = [pattern.removesuffix("*") for pattern in tools["packages"]["find"]["include"]]
    modules = [f"{name}.py" for name in tools["py-modules"]]
    assert {*packages, *modules, "pyproject.toml", "requirements-cpu.txt", "docs/recipes"} <= set(allowed)


def test_the_change_for_gpus_changes_what_it_means_to() -> None:
    changed = load(LEADER_WORKER_SET)
    for step in load(RECIPES / "kubernetes" / "cuda" / "gpus.yaml"):
        *parents, last = step["path"].split("/")[1:]
        at: Any = changed
        for name in parents:
            at = at[int(name)] if isinstance(at, list) else at[name]
        if last == "-":
            at.append(step["value"])
        else:
            assert last in at
            at[last] = step["value"]
    template = changed["spec"]["leaderWorkerTemplate"]
    for pod in (template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]):
        (container,) = pod["containers"]
        assert {
            "name": "RANKS_PER_NODE",
            "value": container["resources"]["limits"]["nvidia.com/gpu"],
        } in container["env"]
        assert container["args"][-2:] == ["--device", "cuda"]
        assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in pod["volumes"]


def test_the_batch_script_is_shell() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=30)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_units() -> None:
    command = ["systemd-analyze", "verify", *map(str, sorted(UNITS.glob("*.service")))]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def instructions(path: Path) -> dict[str, list[str]]:
    """Return a Dockerfile's instructions by name."""
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", path.read_text()))
    found: dict[str, list[str]] = {}
    for line in filter(None, text.splitlines()):
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest.strip())
    return found
