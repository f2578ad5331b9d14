"""torchrun's rendezvous backend `wideep`: it names missing nodes, in any order of arrival; then it is c10d's."""

import concurrent.futures
import threading

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousParameters,
    c10d_rendezvous_backend,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from dispatch.ports import free_port
from server.serve.store import torchrun_backend
from tests.support.service.service_processes import wait_until

WAIT_S = 120.0  # for a meeting, on a busy machine
# Addresses of the endpoint's node ("1") and of the other node. Ranks connect to the first.
ADDRESSES = {"1": "127.0.0.1", "0": "localhost"}


def parameters(port: int, is_host: str, local: str = "", **config: str) -> RendezvousParameters:
    """Return torchrun's parameters for a node of two. An empty `is_host` leaves the choice to torchrun."""
    if is_host:
        config["is_host"] = is_host
    return RendezvousParameters(
        "wideep", f"127.0.0.1:{port}", "one", 2, 2, local_addr=ADDRESSES[local or is_host], **config
    )


def meet(params: RendezvousParameters) -> RendezvousInfo:
    return torchrun_backend.create(params).next_rendezvous()


@pytest.mark.crossed("first", every=2)
@pytest.mark.parametrize(
    ("first", "says"),
    [
        (1, "wideep: waiting for 1 of 2 nodes (joined: 127.0.0.1); run the same command there"),
        (0, "wideep: trying to reach the endpoint: nothing listens at 127.0.0.1:"),
    ],
    ids=["the endpoint's node comes first", "the endpoint's node comes last"],
)
def test_who_waits_says_for_whom_and_all_meet(
    capfd: pytest.CaptureFixture[str], first: int, says: str
) -> None:
    port, said = free_port(), []

    def is_said() -> bool:
        said.append(capfd.readouterr().err)
        return says in "".join(said)

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        waits = threads.submit(meet, parameters(port, is_host=str(first)))
        wait_until(is_said, lambda: "".join(said))
        comes = threads.submit(meet, parameters(port, is_host=str(1 - first)))
        found = [each.result(WAIT_S) for each in (waits, comes)]
    assert sorted((info.rank, info.world_size) for info in found) == [(0, 2), (1, 2)]


def test_the_node_with_the_endpoints_address_hosts_the_store_whatever_its_name_means(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two torchruns on one machine with a host name that resolves elsewhere: one hosts the store, and the other finds it."""
    monkeypatch.setattr(c10d_rendezvous_backend, "_matches_machine_hostname", lambda _host: False)
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(meet, [parameters(port, is_host="", local=each) for each in ("0", "1")]))
    assert sorted((info.rank, info.world_size) for info in found) == [(0, 2), (1, 2)]


def test_an_endpoint_that_nobody_opens_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RendezvousConnectionError, match="cannot reach the endpoint: nothing listens at 127"):
        torchrun_backend.create(parameters(free_port(), is_host="0", join_timeout="1"))


def test_a_node_alone_waits_for_nobody() -> None:
    params = RendezvousParameters("wideep", "localhost:0", "one", 1, 1)
    assert meet(params).world_size == 1


def test_torchrun_finds_it_by_our_entry_point() -> None:
    handler = get_rendezvous_handler(RendezvousParameters("wideep", "localhost:0", "two", 1, 1))
    assert (handler.get_backend(), handler.get_run_id()) == ("wideep", "two")
    assert handler.next_rendezvous().world_size == 1


@pytest.mark.parametrize(
    ("standby", "says"),
    [
        ("127.0.0.1", "--standby is 127.0.0.1, which is an address of the node of --rdzv-endpoint"),
        ("a:b", "--standby is 'a:b'; give a name or an address of the second node"),
    ],
)
def test_a_standby_that_cannot_be_one_is_refused(
    monkeypatch: pytest.MonkeyPatch, standby: str, says: str
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["torchrun", "--no-python", "wideep", "worker", "m", "--standby", standby]
    )
    with pytest.raises(RendezvousError, match=says):
        torchrun_backend.create(parameters(free_port(), is_host="1"))


def test_the_thread_that_names_nodes_is_not_in_the_store_when_the_interpreter_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon thread that returns from the store's C++ code then aborts the process."""
    monkeypatch.setattr(torchrun_backend, "_LOOK_S", 3600.0)
    looks: list[bool] = []

    class Slow:
        def get_state(self) -> None:
            looks.append(False)
            has_begun.set()
            may_end.wait(20)
            looks[-1] = True

    has_begun, may_end = threading.Event(), threading.Event()
    naming = torchrun_backend.NodeNaming(Slow(), 2)  # type: ignore[arg-type]
    naming.start()
    assert has_begun.wait(20)
    threading.Timer(0.05, may_end.set).start()
    naming.end()
    assert not naming.is_alive() and looks == [True]
