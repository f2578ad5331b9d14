"""Prefixes that are read with NIXL in the other node's memory: equal bytes, and every failure falls back to the connection."""

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from kvcache.paged_cache import LayerShape
from kvcache.tiers import peer_link, remote_memory
from kvcache.tiers.frames import Channel, PrefixAnswer
from kvcache.tiers.jobs import MOST_LOAD_S, LoadJob
from kvcache.tiers.records import RecordStore
from kvcache.tiers.remote_memory import NixlAgent, RemoteMemoryError, RemoteRecord
from tests.kvcache.tiers.test_peers import (
    NUM_BLOCKS,
    PLAIN,
    TOKENS,
    Node,
    check_equal,
    fetch_and_leave,
    fill_random,
    nodes,
    started,
)
from tests.kvcache.tiers.test_tiers import SHAPES

pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
__all__ = ["nodes"]


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NIXL use the network: between processes of one machine it copies memory."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def size_of(node: Node) -> int:
    return NUM_BLOCKS * node.units.blocks.num_bytes + node.units.states.num_bytes


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["a record at once", "all at once"])
@pytest.mark.parametrize("shapes", [PLAIN, SHAPES], ids=["blocks", "blocks and states"])
def test_a_prefix_is_read_bit_by_bit(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, shapes: list[LayerShape], at_once: int
) -> None:
    monkeypatch.setattr(remote_memory, "READ_BYTES", at_once)
    source, client = nodes(shapes, has_nixl=True), nodes(shapes, has_nixl=True)
    fill_random(client)
    source.remember(4)
    client.fetch(source.peers.address.address)
    source.remember()
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys()[4:])
    check_equal(client, source)
    assert client.outcomes() == {"whole": 2}
    figures, states = (
        client.tiers.figures,
        source.units.states.num_bytes,
    )  # a second state ends the longer prefix
    assert figures.peer_read_bytes == figures.peer_fetch_bytes == size_of(source) + states
    assert source.tiers.figures.peer_serve_bytes == figures.peer_fetch_bytes


def test_the_time_to_connect_does_not_count_as_a_slow_read(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, client = nodes(PLAIN, has_nixl=True), nodes(PLAIN, has_nixl=True)
    client.tiers.prompt_token_s = 1e-12  # no rate that was measured can be faster than this
    client.fetch(source.peers.address.address)  # it has nothing, so nothing connects
    source.remember(3)
    client.fetch(source.peers.address.address)
    source.remember(4)
    client.fetch(source.peers.address.address)
    source.remember(6)
    client.fetch(source.peers.address.address)
    assert client.outcomes() == {"empty": 1, "whole": 2, "declined": 1}


@pytest.mark.parametrize("has_client", [False, True])
def test_records_are_sent_if_only_one_end_has_nixl(nodes: Callable[..., Node], has_client: bool) -> None:
    source, client = nodes(has_nixl=not has_client), nodes(has_nixl=has_client)
    fill_random(client)
    source.remember()
    client.fetch(source.peers.address.address)
    check_equal(client, source)
    assert client.tiers.figures.peer_read_bytes == 0 < client.tiers.figures.peer_fetch_bytes


def test_a_damaged_record_of_the_source_is_erased_and_not_kept(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN, has_nixl=True), nodes(PLAIN, has_nixl=True)
    fill_random(client)
    source.remember()
    store = source.tiers._tiers[0].blocks
    found = store.offset_of(source.keys()[3])
    assert found is not None
    at = found[0] + 40
    os.pwrite(store._fd, bytes([os.pread(store._fd, 1, at)[0] ^ 1]), at)
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys()[:3]) and client.outcomes() == {"whole": 1}
    assert not source.tiers.has(source.keys()[3])
    check_equal(client, source, 3)


def test_a_record_that_is_replaced_while_it_is_read_is_sent_and_reading_goes_on(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, client = nodes(PLAIN, has_nixl=True), nodes(PLAIN, has_nixl=True)
    fill_random(client)
    source.remember()
    offset_of, keys = RecordStore.offset_of, source.keys()

    def offset_before_the_change(self: RecordStore, key: bytes) -> tuple[int, int] | None:
        found = offset_of(self, key)
        return (found[0], found[1] ^ 1) if found and key == keys[2] else found

    monkeypatch.setattr(RecordStore, "offset_of", offset_before_the_change)
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys())
    check_equal(client, source)
    block = source.units.blocks.num_bytes
    # Two records were right, and the third one was read twice.
    assert client.tiers.figures.peer_read_bytes == 2 * block
    assert client.tiers.figures.peer_fetch_bytes == NUM_BLOCKS * block
    assert client.tiers.figures.num_faults == 0 and client.outcomes() == {"whole": 1}
    monkeypatch.undo()
    other = [3] * len(TOKENS)
    source.remember(6, other)
    client.fetch(source.peers.address.address, other)
    assert client.tiers.figures.peer_read_bytes == (2 + NUM_BLOCKS) * block


def test_an_unwanted_read_ends_early_and_the_next_one_works(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_memory, "READ_BYTES", 1)
    source, client = nodes(PLAIN, has_nixl=True), nodes(PLAIN, has_nixl=True)
    fill_random(client)
    source.remember()
    fetch = fetch_and_leave(client, source.peers.address.address)
    assert len(fetch.keys) == 1
    assert client.fetch(source.peers.address.address).keys == set(client.keys()[1:])
    check_equal(client, source)
    figures = client.tiers.figures
    assert figures.peer_read_bytes == figures.peer_fetch_bytes == size_of(source)


def serve_and_stop(pipe: Connection) -> None:
    """Serve a prefix from a process, which stops after the first answer that lists addresses."""
    node = Node(PLAIN, has_nixl=True)
    node.remember()
    answer = Channel.answer

    def answer_and_stop(self: Channel, content: PrefixAnswer) -> None:
        answer(self, content)
        if content.addresses is not None:
            os.kill(os.getpid(), signal.SIGSTOP)

    Channel.answer = answer_and_stop  # type: ignore[assignment, method-assign]
    pipe.send((node.peers.address.address, [node.record(number) for number in range(NUM_BLOCKS)]))
    pipe.recv()


@pytest.mark.parametrize("is_killed", [False, True], ids=["hangs", "is killed"])
def test_a_server_that_is_lost_while_its_memory_is_read(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    process, pipe = started(serve_and_stop)
    address, records = pipe.recv()
    client = nodes(PLAIN, has_nixl=True)
    fill_random(client)
    given_up = len(remote_memory._given_up)
    meet = NixlAgent.meet

    def meet_and_kill(self: NixlAgent, metadata: bytes) -> str:
        if is_killed:
            process.kill()
            process.join(10)
        return meet(self, metadata)

    monkeypatch.setattr(NixlAgent, "meet", meet_and_kill)
    monkeypatch.setattr(peer_link, "STALL_S", 0.3)  # NIXL uses a core while it waits
    begun_s = time.monotonic()
    fetch = client.fetch(address)
    assert time.monotonic() - begun_s < MOST_LOAD_S + 1
    assert not fetch.keys and client.outcomes() == {"failed": 1}
    assert len(remote_memory._given_up) == given_up + 1, "a late read must not meet memory that is in use"
    if is_killed:
        return
    os.kill(process.pid, signal.SIGCONT)
    monkeypatch.setattr(peer_link, "AVOID_S", 0.0)
    client.peers._links[address]._pace.avoid(float("-inf"))
    assert client.fetch(address).keys == set(client.keys())
    client.do(load := LoadJob(client.keys(), list(range(NUM_BLOCKS))))
    assert load.num_loaded == NUM_BLOCKS
    assert [client.record(number) for number in range(NUM_BLOCKS)] == records
    assert client.tiers.figures.peer_read_bytes == 0, "it sends its records from now on"
    pipe.send("end")
    process.join(10)


@pytest.mark.parametrize("call", ["add_remote_agent", "initialize_xfer", "register_memory"])
def test_a_call_that_hangs_in_nixl_is_left_and_records_are_sent(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    source, client = nodes(PLAIN, has_nixl=True), nodes(PLAIN, has_nixl=True)
    fill_random(client)
    source.remember()
    monkeypatch.setattr(remote_memory, "CALL_S", 0.3)
    monkeypatch.setattr(remote_memory, "START_S", 0.3)
    goes_on = threading.Event()
    agent = client.peers._side.agent
    assert agent is not None
    monkeypatch.setattr(agent._agent, call, lambda *_arguments: goes_on.wait())
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys()) and client.outcomes() == {"whole": 1}
    check_equal(client, source)
    assert client.tiers.figures.peer_read_bytes == 0
    goes_on.set()


def test_a_peer_that_names_wrong_addresses_is_refused(nodes: Callable[..., Node]) -> None:
    """UCX refuses what is not registered: no other memory of the server can be read."""
    agent, other = NixlAgent(), NixlAgent()
    reader = remote_memory.RemoteReader(agent, 64)
    memory = mmap.mmap(-1, 1 << 16)
    address = other.register(memory).address
    for wrong in (address - 64, address + len(memory)):
        records = [RemoteRecord(wrong, 64)]
        with pytest.raises(RemoteMemoryError):
            list(reader.read(other.metadata, records, stall_s=5, until_s=time.monotonic() + 5))
    [record] = reader.read(
        other.metadata, [RemoteRecord(address, 64)], stall_s=5, until_s=time.monotonic() + 5
    )
    assert record == bytes(64)
    with pytest.raises(RemoteMemoryError, match="NIXL"):
        agent.meet(b"nonsense")


def test_memory_that_cannot_be_deregistered_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, agent = len(remote_memory._given_up), NixlAgent()
    remote_memory.RemoteReader(agent, 64).close()
    assert len(remote_memory._given_up) == given_up
    reader = remote_memory.RemoteReader(agent, 64)
    monkeypatch.setattr(agent._agent, "deregister_memory", lambda _descriptors: [][0])
    reader.close()
    assert remote_memory._given_up[given_up:] == [reader._memory]


def test_a_missing_nixl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_memory, "PACKAGES", ("no_such_package",))
    for attempt in (NixlAgent, remote_memory.check_installed):
        with pytest.raises(RemoteMemoryError, match="NIXL is not installed"):
            attempt()


def test_an_agent_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    api = SimpleNamespace(
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=0),
        nixl_agent_config=lambda **_settings: None,
    )
    monkeypatch.setattr(remote_memory, "_import_api", lambda: api)
    monkeypatch.setattr(remote_memory, "START_S", 0.1)
    api.nixl_agent = lambda *_arguments: goes_on.wait()
    with pytest.raises(RemoteMemoryError, match=r"NIXL cannot start: no result within 0\.1 s"):
        NixlAgent()
    goes_on.set()
    api.nixl_agent = lambda *_arguments: [][0]
    with pytest.raises(RemoteMemoryError, match="NIXL cannot start: list index out of range"):
        NixlAgent()
