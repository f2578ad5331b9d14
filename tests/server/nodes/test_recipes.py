"""The exact commands of docs/recipes, run on nodes that share only a network: namespaces, each with its own host name."""

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.service.forked import TORCHRUN, WIDEEP, importing_once
from tests.support.service.namespaces import ask, members, set_link
from tests.support.service.real_service import REPOSITORY, START_S, RealService, write_tiny_model
from tests.support.service.recipes import (
    RECIPES,
    SBATCH,
    NodeCommand,
    compose_nodes,
    kubernetes_nodes,
    unit_command,
)
from tests.support.service.service_processes import has_ended, wait_until

pytestmark = pytest.mark.slow

HEAD, URL = "10.213.7.1", "http://10.213.7.1:8000"
FLAGS = "--kv-cache-memory 16M"
SMALL_TIER = "--kv-offloading-size 64M"  # through which pools hand requests over
SAID_S = 30.0  # includes the time that a loaded machine needs to start Python
LEFT_S = 60.0  # for the other nodes to detect the loss of a node
STOPPED_S = 60.0
DRAIN = {"DRAIN_SECONDS": "1"}  # a node that leaves serves for as long, and for 3 s
NUM_OPEN, LONG_ANSWER = 4, 200  # requests, and tokens of each

SRUN = """\
#!/bin/sh
# Runs a step's command on each node of the job; signals to the step reach all of them.
while [ "${1#-}" != "$1" ]; do shift; done
trap 'kill -TERM $pids 2>/dev/null' TERM INT
number=0
for node in $NODES_OF_THE_TEST; do
    SLURM_NODEID=$number $node "$@" & pids="$pids $!"
    number=$((number + 1))
done
while ! wait; do :; done
"""


class Machines:
    """Nodes that run recipes. Each has a namespace, a host name, a home, and a PATH with the programs of an image."""

    def __init__(self, namespaces: Sequence[str], directory: Path) -> None:
        self.namespaces, self.directory = namespaces, directory
        write_tiny_model(directory / "tiny")
        (directory / "cluster.key").write_text("5ec2e7" * 11)
        programs = {
            "wideep": f'exec {shlex.join(WIDEEP)} "$@"',
            "wideep-node": f'exec {sys.executable} {RECIPES / "node.py"} "$@"',
            "torchrun": f'exec {shlex.join(importing_once(TORCHRUN))} "$@"',
            "tini": 'shift\nexec "$@"',
            "python3": f'exec {sys.executable} "$@"',
            "scontrol": "".join(f"echo 10.213.7.{at + 1}\n" for at in range(len(namespaces)))
            + "seq 20000",  # more than a pipe holds: a reader of only the first line breaks the pipe
        }
        (directory / "bin").mkdir()
        for name, lines in programs.items():
            self._write_program(name, f"#!/bin/sh\n{lines}\n")
        self._write_program("srun", SRUN)
        for at, namespace in enumerate(namespaces):
            (directory / f"home{at}").mkdir()
            set_link(namespace, "down")
            set_link(namespace, "name", "eth0")  # as in containers
            subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", "up"], check=True, timeout=10)

    def _write_program(self, name: str, text: str) -> None:
        path = self.directory / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def inside(self, at: int) -> list[str]:
        """Return the command prefix that runs a command on a node."""
        named = f'hostname node{at}; export HOME={self.directory}/home{at}; exec "$0" "$@"'
        return ["ip", "netns", "exec", self.namespaces[at], "unshare", "--uts", "sh", "-c", named]

    def command(self, at: int, node: NodeCommand) -> list[str]:
        """Return a recipe's command line on a node, with secrets at the paths where the recipe's program would mount them."""
        environment = {name: value for name, value in node.environment.items() if name != "HOME"} | DRAIN
        if "CLUSTER_KEY_SECRET" in environment:
            environment["CLUSTER_KEY_SECRET"] = str(self.directory / "cluster.key")
        path = f"PATH={self.directory}/bin:{os.environ['PATH']}"
        return [
            *self.inside(at),
            "env",
            *(f"{name}={value}" for name, value in environment.items()),
            path,
            *node.words,
        ]

    @contextlib.contextmanager
    def run(self, commands: Sequence[Sequence[str]], name: str = "output") -> Iterator[RealService]:
        """Run commands in random order, and finally stop them as Docker, Kubernetes and systemd do."""
        order = random.sample(range(len(commands)), len(commands))
        print(f"{name}: started in the order {order}")
        with RealService(8000, [commands[at] for at in order], self.directory / f"{name}.txt") as service:
            yield service

    def answers(self) -> list[str]:
        """Return one answer of the service to each node."""
        return [self.answer(name, 8) for name in self.namespaces]

    def answer(self, namespace: str, max_tokens: int) -> str:
        """Request an answer of `max_tokens` tokens from a node and return it."""
        body = {
            "model": "tiny",
            "prompt": "the cat",
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = ask(namespace, "POST", f"{URL}/v1/completions", body)
        assert answer, "every node gets an answer"
        text: str = json.loads(answer)["choices"][0]["text"]
        return text

    def answers_during(self, leave: Callable[[], object]) -> list[str]:
        """Return long answers of all ranks. A node leaves while they are generated."""
        here = self.namespaces[0]
        with ThreadPoolExecutor(NUM_OPEN) as threads:
            answers = [threads.submit(self.answer, here, LONG_ANSWER) for _ in range(NUM_OPEN)]
            wait_until(lambda: _num_open(here) > 0, lambda: "no request is running")
            leave()
            return [answer.result() for answer in answers]

    def wait_for(self, ranks: list[int], service: RealService, within_s: float = START_S) -> None:
        here = self.namespaces[0]

        def do_serve() -> bool:
            service.check_runs()
            return ask(here, "GET", f"{URL}/health") is not None and members(here, URL) == ranks

        wait_until(do_serve, service.output, within_s=within_s)


def _num_open(namespace: str) -> int:
    load = ask(namespace, "GET", f"{URL}/load")
    return json.loads(load)["server_load"] if load else 0


@pytest.fixture
def machines(namespaces: list[str], tmp_path: Path) -> Machines:
    return Machines(namespaces, tmp_path)


def by_compose(machines: Machines, **changed: str) -> list[NodeCommand]:
    variables = {"MODEL": str(machines.directory / "tiny"), "FLAGS": FLAGS, "HEAD": HEAD, **changed}
    return compose_nodes(variables)


def by_kubernetes(machines: Machines) -> list[NodeCommand]:
    variables = {"MODEL": str(machines.directory / "tiny"), "LWS_LEADER_ADDRESS": HEAD}
    nodes = kubernetes_nodes(variables, size=len(machines.namespaces))
    return [node._replace(words=[*node.words, *FLAGS.split()]) for node in nodes]


def by_systemd(machines: Machines) -> list[NodeCommand]:
    variables = {"MODEL": str(machines.directory / "tiny"), "HEAD": HEAD}
    variables |= {"NODES": str(len(machines.namespaces)), "FLAGS": f"--host 0.0.0.0 {FLAGS}"}
    return [
        unit_command("wideep-node.service", "node.env", {**variables, "NODE_RANK": str(at)})
        for at in range(len(machines.namespaces))
    ]


def job(machines: Machines, **variables: str) -> list[str]:
    """Return the batch script's command, as Slurm starts it on a job's first node."""
    places = [variables["NODE_RANK"]] if "NODE_RANK" in variables else range(len(machines.namespaces))
    wrapped = []
    for at in map(int, places):
        program = machines.directory / "bin" / f"on-node{at}"
        program.write_text(f'#!/bin/sh\nexec {shlex.join(machines.inside(at))} "$@"\n')
        program.chmod(0o755)
        wrapped.append(str(program))
    said = {
        "MODEL": str(machines.directory / "tiny"),
        "WIDEEP": str(REPOSITORY),
        "VENV": str(machines.directory),  # the programs are in its bin
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_JOB_NUM_NODES": str(len(machines.namespaces)),
        "NODES_OF_THE_TEST": " ".join(wrapped),
        "PATH": f"{machines.directory}/bin:{os.environ['PATH']}",
        **DRAIN,
        **variables,
    }
    return ["env", *(f"{name}={value}" for name, value in said.items()), "bash", str(SBATCH), *FLAGS.split()]


def stop(service: RealService) -> None:
    """Send SIGTERM, as Docker, Kubernetes and systemd do, and check that all processes end."""
    left = service.descendants()
    for process in service.processes:
        process.send_signal(signal.SIGTERM)
    for process in service.processes:
        process.wait(STOPPED_S)
    assert all(has_ended(pid, STOPPED_S) for pid in left), service.output()


@pytest.mark.parametrize("namespaces", [3], indirect=True)
def test_nodes_start_in_any_order_and_serve_together_and_end_on_sigterm(machines: Machines) -> None:
    """Those of Kubernetes. The tests below start those of Compose, systemd and Slurm."""
    nodes = by_kubernetes(machines)
    with machines.run([machines.command(at, node) for at, node in enumerate(nodes)]) as service:
        machines.wait_for(list(range(len(nodes))), service)
        assert len(set(machines.answers())) == 1
        stop(service)


def test_a_node_that_leaves_hands_its_requests_on_and_comes_back_with_the_same_line(
    machines: Machines,
) -> None:
    commands = [machines.command(at, node) for at, node in enumerate(by_compose(machines))]
    *stay, leaves = commands
    with machines.run(stay, "head") as head:
        with machines.run([leaves], "other") as other:
            machines.wait_for(list(range(len(commands))), head)
            expected = machines.answers()
            long_answer = machines.answer(machines.namespaces[0], LONG_ANSWER)
            assert machines.answers_during(lambda: stop(other)) == [long_answer] * NUM_OPEN
        wait_until(
            lambda: len(members(machines.namespaces[0], URL)) == len(stay), head.output, within_s=LEFT_S
        )
        with machines.run([leaves], "again") as again:
            machines.wait_for(list(range(len(commands))), again)
            assert f"the service at {HEAD}:29400 runs; this node joins it" in again.output()
            assert machines.answers() == expected
            assert head.processes[0].poll() is None
            stop(again)
        stop(head)


def by_kubernetes_with_pools(machines: Machines) -> list[NodeCommand]:
    return [
        node._replace(
            words=[*node.words, *SMALL_TIER.split()],
            environment={**node.environment, "ROLES": "prefill decode decode"},
        )
        for node in by_kubernetes(machines)
    ]


def by_compose_with_pools(machines: Machines) -> list[NodeCommand]:
    return by_compose(machines, ROLES="prefill decode", FLAGS=f"{FLAGS} {SMALL_TIER}")


def roles(machines: Machines) -> dict[str, str]:
    """Return the roles of the pools that serve, by name."""
    answer = ask(machines.namespaces[0], "GET", f"{URL}/pools")
    return {each["name"]: each["role"] for each in json.loads(answer)["pools"]} if answer else {}


def check_pools_of_two_nodes(machines: Machines, service: RealService) -> None:
    """Wait for the pools of a node for prompts and of one for answers, and end them."""
    wait_until(lambda: members(machines.namespaces[0], URL) == [0, 1], service.output, within_s=START_S)
    assert roles(machines) == {"prefill-0": "prefill", "decode-1": "decode"}
    assert len(set(machines.answers())) == 1
    stop(service)


def test_nodes_of_compose_with_roles_serve_with_a_pool_on_each_node(machines: Machines) -> None:
    commands = [machines.command(at, node) for at, node in enumerate(by_compose_with_pools(machines))]
    with machines.run(commands) as service:
        check_pools_of_two_nodes(machines, service)


@pytest.mark.parametrize("namespaces", [3], indirect=True)
def test_nodes_with_roles_are_pools_that_start_in_any_order_leave_and_come_back(machines: Machines) -> None:
    nodes = by_kubernetes_with_pools(machines)
    *stay, leaves = [machines.command(at, node) for at, node in enumerate(nodes)]
    every = list(range(len(nodes)))
    named = {"prefill-0": "prefill", "decode-1": "decode", "decode-2": "decode"}
    with machines.run(stay, "head") as head:
        with machines.run([leaves], "other") as other:
            wait_until(
                lambda: sorted(members(machines.namespaces[0], URL)) == every, head.output, within_s=START_S
            )
            assert roles(machines) == named
            expected = machines.answers()
            long_answer = machines.answer(machines.namespaces[0], LONG_ANSWER)
            assert machines.answers_during(lambda: stop(other)) == [long_answer] * NUM_OPEN
        wait_until(
            lambda: len(members(machines.namespaces[0], URL)) == len(stay), head.output, within_s=LEFT_S
        )
        with machines.run([leaves], "again") as again:
            wait_until(
                lambda: sorted(members(machines.namespaces[0], URL)) == every, again.output, within_s=START_S
            )
            assert roles(machines) == named
            assert machines.answers() == expected
            stop(again)
        stop(head)


def test_when_node_0_was_away_all_nodes_meet_again_with_the_same_lines(machines: Machines) -> None:
    again = ["sh", "-c", 'trap "exit 0" TERM INT; while :; do "$@" & wait $!; sleep 1; done', "sh"]
    commands = [[*again, *machines.command(at, node)] for at, node in enumerate(by_systemd(machines))]
    with machines.run(commands) as service:
        machines.wait_for([0, 1], service)
        expected = machines.answers()
        for pid in _processes_on(machines, 0, service):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not members(machines.namespaces[0], URL), service.output, within_s=LEFT_S)
        machines.wait_for([0, 1], service)
        assert machines.answers() == expected


def test_a_node_names_the_head_that_is_missing_within_seconds(machines: Machines) -> None:
    commands = [machines.command(at, node) for at, node in enumerate(by_compose(machines))]
    missing = f"node 0 is missing: nothing answers at {HEAD}:29400"
    with machines.run(commands[1:]) as service:
        wait_until(lambda: missing in service.output(), service.output, within_s=SAID_S)
        stop(service)


def test_the_head_names_those_who_are_here_while_others_are_missing(machines: Machines) -> None:
    commands = [machines.command(at, node) for at, node in enumerate(by_compose(machines))]
    with machines.run(commands[:1]) as service:
        waits = f"wideep: waiting for 1 of 2 nodes (joined: {HEAD})"
        wait_until(lambda: waits in service.output(), service.output, within_s=SAID_S)
        stop(service)


def test_a_wrong_interface_is_named_and_ends_the_start_of_all_nodes(machines: Machines) -> None:
    """test_nodes has one on one node."""
    commands = [machines.command(at, node) for at, node in enumerate(by_compose(machines, IFNAME="eth7"))]
    with contextlib.ExitStack() as running:
        services = [
            running.enter_context(machines.run([command], f"node{at}")) for at, command in enumerate(commands)
        ]
        for service in services:
            assert service.processes[0].wait(START_S) != 0
            assert "GLOO_SOCKET_IFNAME is 'eth7', but there is no such interface" in service.output()
            stop(service)


def test_a_job_of_slurm_serves_on_its_nodes_and_a_second_job_brings_a_lost_one_back(
    machines: Machines,
) -> None:
    with machines.run([job(machines)]) as service:
        machines.wait_for([0, 1], service)
        expected = machines.answers()
        lost = _processes_on(machines, 1, service)
        for pid in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(members(machines.namespaces[0], URL)) == 1, service.output, within_s=LEFT_S)
        second = job(machines, HEAD=HEAD, NODES="2", NODE_RANK="1", SLURM_JOB_NUM_NODES="1")
        with machines.run([second], "second") as joined:
            machines.wait_for([0, 1], joined)
            assert machines.answers() == expected
            stop(joined)
        stop(service)


def test_a_job_of_slurm_with_roles_serves_with_a_pool_on_each_node(machines: Machines) -> None:
    with machines.run([[*job(machines, ROLES="prefill decode"), *SMALL_TIER.split()]]) as service:
        check_pools_of_two_nodes(machines, service)


def _processes_on(machines: Machines, at: int, service: RealService) -> list[int]:
    """Return the pids of a node that descend from the service's commands."""
    listed = subprocess.run(
        ["ip", "netns", "pids", machines.namespaces[at]],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return sorted({int(pid) for pid in listed.stdout.split()} & set(service.descendants()))
