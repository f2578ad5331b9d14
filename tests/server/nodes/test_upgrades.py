"""A node of a running service is drained, ended and started again from another copy of WideEP, in network namespaces."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.machine.roots import PACKAGES
from tests.server.nodes.test_nodes import (
    END_S,
    ENDPOINT_NODE,
    OTHER_NODE,
    URL,
    engine_of,
    joining,
    members,
    start,
    stream_all,
    wait_until_healthy,
)
from tests.support.service.forked import WIDEEP
from tests.support.service.namespaces import ask
from tests.support.service.real_service import REPOSITORY, RealService
from tests.support.service.service_processes import wait_until

MESSAGES, VERSION = "server/link/messages.py", "server/machine/versions.py"
# Files that other tests are writing. Compiled code is copied: numba and Python check only the time and the size of its source.
BEING_WRITTEN = shutil.ignore_patterns("*.tmp.*", "*.pyc.*")


def copied(root: Path, changed: str, old: str, new: str) -> list[str]:
    """Copy WideEP, change the first `old` in one of its files, and return the copy's command."""
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, root / package, ignore=BEING_WRITTEN)
    shutil.copy(REPOSITORY / "wideep.py", root)
    text = (root / changed).read_text()
    assert old in text
    (root / changed).write_text(text.replace(old, new, 1))
    return [*WIDEEP[:-1], str(root / Path(WIDEEP[-1]).relative_to(REPOSITORY))]


@pytest.fixture
def service(namespaces: list[str], tmp_path: Path) -> Iterator[RealService]:
    with start(namespaces, tmp_path, "--shutdown-timeout-seconds=1") as service:
        wait_until_healthy(service, namespaces)
        yield service


def rank_at(service: RealService, namespace: str) -> int:
    """Return the rank with the engine in a namespace."""
    speed = json.loads(ask(namespace, "GET", f"{URL}/throughput") or "{}")
    return next(int(rank["rank"]) for rank in speed["ranks"] if rank["pid"] == engine_of(service, namespace))


@pytest.mark.slow
def test_a_drained_node_returns_with_another_version_if_its_digests_match(
    service: RealService, namespaces: list[str], tmp_path: Path
) -> None:
    here, other = namespaces[ENDPOINT_NODE], namespaces[OTHER_NODE]
    expected = stream_all(here)
    leaving = rank_at(service, other)

    def leave() -> None:
        assert ask(here, "POST", f"{URL}/ranks/drain", {"rank": leaving, "timeout_s": 20}) is not None
        service.processes[OTHER_NODE].terminate()
        service.processes[OTHER_NODE].wait(END_S)

    assert stream_all(here, then=leave) == expected, "its streams continue on the other node"
    wait_until(lambda: members(here) == [1 - leaving], service.output)
    model = tmp_path / "tiny"
    refused = copied(tmp_path / "refused", MESSAGES, "_FORM = 2", "_FORM = 3")
    with joining(other, model, tmp_path / "refused.txt", program=refused) as node:
        assert node.wait_ended() != [0]
        assert "with other messages (another link digest)" in node.output(), node.output()
    assert members(here) == [1 - leaving]

    upgraded = copied(tmp_path / "upgraded", VERSION, '"""', '"""A later version: ')
    with joining(other, model, tmp_path / "upgraded.txt", program=upgraded) as node:
        node.wait_until(lambda: members(here) == [0, 1])
        assert stream_all(other) == stream_all(here) == expected
        assert "they serve together, but upgrade the others too" in node.output()
