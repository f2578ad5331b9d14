"""Read the recipes of docs/recipes as their programs do, and return command and variables of each node.

It supports only syntax in use: Compose's `${NAME:-default}`, Kubernetes' `$(NAME)`, systemd's `${NAME}` and `$NAME`.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

RECIPES = Path(__file__).parents[3] / "docs" / "recipes"
COMPOSE = RECIPES / "docker" / "compose.yaml"
LEADER_WORKER_SET = RECIPES / "kubernetes" / "base" / "leaderworkerset.yaml"
UNITS = RECIPES / "systemd"
SBATCH = RECIPES / "slurm" / "wideep.sbatch"


class NodeCommand(NamedTuple):
    """Command and variables of one node."""

    words: list[str]
    environment: dict[str, str]


def load(path: Path) -> Any:
    """Read a file with one YAML document."""
    return yaml.safe_load(path.read_text())


def compose_nodes(variables: Mapping[str, str]) -> list[NodeCommand]:
    """Return the services of compose.yaml, with the user's variables."""

    def put_in(found: re.Match[str]) -> str:
        return variables.get(found[1]) or found[2]

    text = re.sub(r"\$\{(\w+):-([^}]*)\}", put_in, COMPOSE.read_text())
    return [
        NodeCommand(
            [*service["entrypoint"], *shlex.split(service["command"])],
            {name: str(value or "") for name, value in service["environment"].items()},
        )
        for _, service in sorted(yaml.safe_load(text)["services"].items())
    ]


def pods(size: int) -> list[dict[str, Any]]:
    """Return the pod specs of a group."""
    template = load(LEADER_WORKER_SET)["spec"]["leaderWorkerTemplate"]
    return [template["workerTemplate" if number else "leaderTemplate"]["spec"] for number in range(size)]


def kubernetes_nodes(variables: Mapping[str, str], *, size: int) -> list[NodeCommand]:
    """Return the pods of a group. The variables are those of LeaderWorkerSet and the user's changes in the manifest."""
    nodes = []
    for number, pod in enumerate(pods(size)):
        (container,) = pod["containers"]
        known = {"LWS_GROUP_SIZE": str(size), "LWS_WORKER_INDEX": str(number), **variables}
        for entry in container["env"]:
            if "value" in entry and entry["name"] not in variables:
                known[entry["name"]] = _in_parentheses(entry["value"], known)
        words = [_in_parentheses(word, known) for word in (*container["command"], *container["args"])]
        nodes.append(NodeCommand(words, known))
    return nodes


def _in_parentheses(text: str, known: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], text)


def unit_command(unit: str, settings: str, variables: Mapping[str, str]) -> NodeCommand:
    """Return a unit's ExecStart with its settings file, in which the user has changed the variables."""
    said = dict(line.split("=", 1) for line in unit_lines(settings))
    known = {name: value.strip('"') for name, value in said.items()} | dict(variables)
    words: list[str] = []
    for word in dict(line.split("=", 1) for line in unit_lines(unit))["ExecStart"].split():
        if re.fullmatch(r"\$\w+", word):
            words += known[word[1:]].split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: known[found[1]], word))
    return NodeCommand(words, known)


def unit_lines(name: str) -> list[str]:
    """Return the lines of a unit or settings file, without comments and headings."""
    lines = (UNITS / name).read_text().splitlines()
    return [line for line in lines if line and line[0] not in "#["]
