"""The state of a rendezvous is in a store that anyone can write to: code in a stranger's value is never run."""

import concurrent.futures
import os
import pickle
import signal
import subprocess
import sys
import time
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import DistNetworkError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
    RendezvousStateError,
    dynamic_rendezvous,
)

from dispatch.ports import free_port
from server.serve.store.torchrun_backend import (
    MOST_FOREIGN,
    ForeignStateError,
    StateBackend,
    cluster_key_of,
    create,
    read_state,
)
from tests.support.service.service_processes import wait_until

WAIT_S = 120.0
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
STATE = "torch.rendezvous.none"


class Attack:
    """A pickle that creates a file in the process that loads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (os.mkdir, (str(self.path),))


def attack(path: Path) -> bytes:
    """Return a stored value that creates a folder if it is unpickled."""
    return b64encode(pickle.dumps(Attack(path)))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


class Broken:
    """A connection to a store that may be lost."""

    def __init__(self, store: TCPStore) -> None:
        self._store, self.is_lost = store, False

    def get(self, key: str) -> bytes:
        return self._present.get(key)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._present.compare_set(key, expected, value)

    @property
    def _present(self) -> TCPStore:
        if self.is_lost:
            raise DistNetworkError("lost")
        return self._store


def own_state(*, complete: bool = False) -> bytes:
    """Return a state as c10d's handler writes it, with all its kinds of fields."""
    state, node = dynamic_rendezvous._RendezvousState(), dynamic_rendezvous._NodeDesc("10.0.0.1", 7, 0)
    state.participants[node] = 0
    state.wait_list.add(node)
    state.complete = complete
    state.last_heartbeats[node] = state.deadline = datetime.now(UTC)
    return pickle.dumps(state)


def test_a_state_of_the_handler_is_read_and_an_attack_is_not_run(tmp_path: Path) -> None:
    assert [node.addr for node in read_state(own_state()).participants] == ["10.0.0.1"]
    pickle.loads(pickle.dumps(Attack(tmp_path / "control")))
    assert (tmp_path / "control").exists(), "the attack works on a plain pickle"
    for hostile in (
        pickle.dumps(Attack(tmp_path / "ran")),
        pickle.dumps(Attack(tmp_path / "ran"), protocol=0),
        pickle.dumps([own_state(), Attack(tmp_path / "ran")]),
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("x")\'\ntR.',
        pickle.dumps({"round": 0}),
        b"",
        b"\x80",
        own_state()[:-20],
    ):
        with pytest.raises(ForeignStateError):
            read_state(hostile)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("is_first", [True, False], ids=["before a state", "over a state"])
def test_what_a_stranger_writes_is_ignored_and_replaced(
    store: TCPStore, tmp_path: Path, capfd: pytest.CaptureFixture[str], key: bytes | None, is_first: bool
) -> None:
    backend, other = (StateBackend(store, "none", key) for _ in range(2))
    assert backend.get_state() is None
    token = None
    if not is_first:
        written = backend.set_state(own_state())
        assert written is not None and written[2]
        token = written[1]
    for hostile in (attack(tmp_path / "ran"), b"\xff\xfe no base64", b""):
        store.set(STATE, hostile)
        found = backend.get_state()
        assert (found is None) == (token is None), "the newest verified state, if any"
        written = backend.set_state(own_state(), found and found[1])
        assert written is not None and written[2], "it replaces invalid states"
        token = written[1]
        assert other.get_state() == written[:2]
    assert not (tmp_path / "ran").exists()
    assert "the rendezvous state in the store is not valid" in capfd.readouterr().err


def test_a_state_is_written_over_what_it_was_derived_from_only(store: TCPStore) -> None:
    one, other = (StateBackend(store, "none", KEY) for _ in range(2))
    first = one.set_state(own_state())
    assert first is not None and first[2]
    second = other.set_state(own_state(), first[1])
    assert second is not None and second[2]
    late = one.set_state(pickle.dumps(dynamic_rendezvous._RendezvousState()), b"something older")
    assert late is not None and (late[0], late[2]) == (second[0], False)


@pytest.mark.parametrize(("key", "other"), [(KEY, OTHER_KEY), (KEY, None), (None, KEY)])
def test_nodes_with_two_keys_are_told_so(store: TCPStore, key: bytes | None, other: bytes | None) -> None:
    one, two = StateBackend(store, "none", key), StateBackend(store, "none", other)
    with pytest.raises(RendezvousStateError, match="give all nodes the same --cluster-key-file"):
        for _ in range(2 * MOST_FOREIGN):
            for backend in (one, two):
                found = backend.get_state()
                state = dynamic_rendezvous._RendezvousState()
                backend.set_state(pickle.dumps(state) + os.urandom(4), found and found[1])


def test_a_service_that_runs_goes_on_whatever_strangers_write(store: TCPStore) -> None:
    backend = StateBackend(store, "none", KEY, tells=False)
    state = dynamic_rendezvous._RendezvousState()
    state.complete = True
    backend.set_state(pickle.dumps(state))
    for number in range(2 * MOST_FOREIGN):
        store.set(STATE, f"{number}")
        found = backend.get_state()
        assert found is not None and found[0] == pickle.dumps(state)


def write_key(directory: Path, key: bytes = KEY) -> str:
    path = directory / "cluster.key"
    path.write_bytes(key)
    path.chmod(0o600)
    return str(path)


def test_the_key_is_that_of_the_workers(tmp_path: Path) -> None:
    path, config = write_key(tmp_path), tmp_path / "wideep.yaml"
    config.write_text(f"cluster-key-file: {path}\n")
    params = RendezvousParameters("wideep", "localhost:0", "one", 1, 1)
    torchrun = ["torchrun", "--nnodes", "2", "--no-python", "wideep", "worker", "demo"]
    assert cluster_key_of(params, torchrun) is None
    for words in (["--cluster-key-file", path], [f"--cluster_key_file={path}"], ["--config", str(config)]):
        assert cluster_key_of(params, [*torchrun, *words]) == KEY
    said = RendezvousParameters("wideep", "localhost:0", "one", 1, 1, cluster_key_file=path)
    assert cluster_key_of(said, ["torchrun", "a-script"]) == KEY
    with pytest.raises(RendezvousError, match="cannot be read"):
        cluster_key_of(params, [*torchrun, "--cluster-key-file", str(tmp_path / "missing")])


@pytest.mark.crossed("with_key", every=2)
@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_nodes_meet_although_a_stranger_writes_to_the_store(tmp_path: Path, with_key: bool) -> None:
    port, config = free_port(), {"cluster_key_file": write_key(tmp_path)} if with_key else {}
    params = [
        RendezvousParameters(
            "wideep", f"127.0.0.1:{port}", "none", 2, 2, local_addr="127.0.0.1", is_host=is_host, **config
        )
        for is_host in ("1", "0")
    ]
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        head = threads.submit(lambda: create(params[0]).next_rendezvous())
        write_attack(connect(port), tmp_path)
        other = threads.submit(lambda: create(params[1]).next_rendezvous())
        found = sorted(each.result(WAIT_S).rank for each in (head, other))
    assert found == [0, 1] and not (tmp_path / "ran").exists()


def connect(port: int) -> TCPStore:
    """Connect to a store as any client that reaches its port can."""
    until_s = time.monotonic() + WAIT_S
    while True:
        try:
            return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))
        except RuntimeError:
            assert time.monotonic() < until_s, "no store listens there"


def write_attack(stranger: TCPStore, directory: Path) -> None:
    """Overwrite the state of a node that waits for another one."""
    wait_until(lambda: len(stranger.get(STATE)) > 50, lambda: "the first node has not come")
    stranger.set(STATE, attack(directory / "ran"))


@pytest.mark.slow
@pytest.mark.parametrize("with_key", [False, True], ids=["without a key", "with a key"])
def test_a_real_torchrun_runs_nothing_that_a_stranger_writes(tmp_path: Path, with_key: bool) -> None:
    """Two torchruns on one machine. The stranger writes while the first waits for the second."""
    port = free_port()
    key = ["--cluster-key-file", write_key(tmp_path)] if with_key else []
    script = tmp_path / "worker.py"
    script.write_text("import os; print('worker', os.environ['RANK'], flush=True)")
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
        *("--rdzv-backend=wideep", f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1"),
        *("--no-python", sys.executable, str(script), *key),
    ]
    agents = []
    try:
        for node in (0, 1):
            output = (tmp_path / f"{node}.txt").open("w")
            agents.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            )
            output.close()
            if node == 0:
                write_attack(connect(port), tmp_path)
        statuses = [agent.wait(WAIT_S) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    said = [(tmp_path / f"{node}.txt").read_text() for node in (0, 1)]
    assert statuses == [0, 0] and all("worker" in each for each in said), said
    assert not (tmp_path / "ran").exists()
    assert "the rendezvous state in the store is not valid" in said[0]


@pytest.mark.parametrize("key", [None, KEY])
def test_a_state_continues_in_the_standbys_store_when_the_first_one_is_lost(
    store: TCPStore, key: bytes | None
) -> None:
    second = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    broken = Broken(store)
    connection: Any = broken
    backends = [StateBackend(connection, "none", key, open_standby=lambda: second) for _ in range(2)]
    written = backends[0].set_state(own_state(complete=False))
    assert written is not None
    backends[1].get_state()
    broken.is_lost = True
    with pytest.raises(RendezvousConnectionError):
        backends[0].get_state()  # not all nodes have met
    broken.is_lost = False
    written = backends[0].set_state(own_state(complete=True), written[1])
    assert written is not None and backends[1].get_state() == written[:2]
    broken.is_lost = True
    assert backends[0].get_state() == written[:2]
    later = backends[0].set_state(own_state(complete=True), written[1])
    assert later is not None and later[2], "the token is the state's in either store"
    assert backends[1].get_state() == later[:2]


def test_without_a_standby_a_lost_store_is_an_error(store: TCPStore) -> None:
    broken = Broken(store)
    connection: Any = broken
    backend = StateBackend(connection, "none", None)
    backend.set_state(own_state(complete=True))
    broken.is_lost = True
    with pytest.raises(RendezvousConnectionError, match="the endpoint's store does not answer"):
        backend.get_state()
