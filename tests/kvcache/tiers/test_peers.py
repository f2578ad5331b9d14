"""Fetching prefixes from another node: the bytes are equal, only what is missing is sent, and no fault or stranger does harm."""

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from kvcache.paged_cache import LayerShape
from kvcache.prefix import ROOT_KEY, PrefixIndex
from kvcache.tiers import frames, peer_link, peer_server
from kvcache.tiers.frames import Channel
from kvcache.tiers.jobs import MOST_LOAD_S, FetchJob, LoadJob, SaveJob
from kvcache.tiers.peer_link import MEASURE_AGAIN_S, TransferPace
from kvcache.tiers.peers import PeerNetwork, Peers
from kvcache.tiers.records import RecordLayout
from tests.kvcache.tiers.test_tiers import MEMORY, SHAPES, Rank
from tests.support.ranks import rank_context

SECRET = b"known to this service"
PLAIN = SHAPES[:1]
TOKENS = [7 * place % 50 for place in range(24)]  # six blocks
NUM_BLOCKS = len(TOKENS) // 4


class Node(Rank):
    """The only rank of a node, with peers on other nodes."""

    def __init__(
        self,
        shapes: list[LayerShape] = SHAPES,
        *,
        secret: bytes = SECRET,
        model: bytes = b"m" * 32,
        software: bytes = b"s" * 32,
        host_bytes: int = MEMORY,
        has_nixl: bool = False,
    ) -> None:
        super().__init__(shapes=shapes, host_bytes=host_bytes)
        blocks = RecordLayout(model, software, self.units.blocks.num_bytes)
        size = self.units.states.num_bytes
        states = RecordLayout(model, software, size) if size else None
        self.peers = Peers(
            self.tiers, self.tiers._tiers[0], PeerNetwork("127.0.0.1", secret, has_nixl),
            memory="here", blocks=blocks, states=states, block_tokens=4,
        )  # fmt: skip
        self.tiers.peers = self.peers
        self.has_states = states is not None

    def keys(self, tokens: Sequence[int] = TOKENS) -> list[bytes]:
        return PrefixIndex(4, self.tiers.secret).keys_of(list(tokens), ROOT_KEY)

    def remember(self, num_blocks: int = NUM_BLOCKS, tokens: Sequence[int] = TOKENS) -> None:
        """Save the first blocks of a prefix, and the state after them. Block n of the cache is that of the prefix, modulo 8."""
        keys = self.keys(tokens)
        for number in range(num_blocks):
            self.do(SaveJob(number % 8, keys[number]))
        if self.has_states:
            self.do(SaveJob(2, keys[num_blocks - 1], is_state=True))

    def fetch(self, address: str, tokens: Sequence[int] = TOKENS, **known: int) -> FetchJob:
        """Fetch a prefix, and wait for the end."""
        fetch = FetchJob(address, list(tokens), ROOT_KEY, **known)
        self.tiers.fetch(fetch)
        self.until(lambda: fetch in self.tiers.finished())
        return fetch

    def outcomes(self) -> dict[str, int]:
        figures = self.tiers.figures._asdict()
        found = {name: figures[f"num_fetches_{name}"] for name in ("whole", "empty", "declined", "failed")}
        return {name: count for name, count in found.items() if count}

    def forget_peers(self) -> None:
        """Forget connections and what was learned about peers."""
        for link in self.peers._links.values():
            link.close()
        self.peers._links.clear()

    def close(self) -> None:
        self.tiers.close()
        for tier in self.tiers._tiers:
            tier.blocks.close()
            if tier.states is not None:
                tier.states.close()


@pytest.fixture
def nodes() -> Iterator[Callable[..., Node]]:
    """Return a function that makes nodes, which are closed after the test."""
    made: list[Node] = []

    def make(*arguments: Any, **settings: Any) -> Node:
        made.append(Node(*arguments, **settings))
        return made[-1]

    yield make
    for node in made:
        node.close()


@pytest.fixture
def stall_s(monkeypatch: pytest.MonkeyPatch) -> float:
    """Shorten the time after which a silent peer is lost."""
    monkeypatch.setattr(frames, "STALL_S", 0.3)
    monkeypatch.setattr(peer_server, "STALL_S", 0.3)
    return 0.3


def fill_random(node: Node, seed: int = 9) -> None:
    """Give a node other numbers than those that every `Rank` begins with."""
    generator = random.Random(seed)
    for part in node.parts():
        part.fill_(generator.random())


def check_equal(client: Node, source: Node, num_blocks: int = NUM_BLOCKS) -> None:
    """Load a fetched prefix and compare it with what the source has computed."""
    keys = client.keys()
    for number in range(num_blocks):
        client.do(load := LoadJob([keys[number]], [7]))
        assert load.num_loaded == 1, number
        assert client.record(7) == source.record(number % 8)
    if client.has_states:
        client.do(load := LoadJob([], [], state_key=keys[num_blocks - 1], slot=3))
        assert load.has_state and client.record(3, is_state=True) == source.record(2, is_state=True)


@pytest.mark.parametrize("shapes", [PLAIN, SHAPES], ids=["blocks", "blocks and states"])
def test_a_prefix_is_copied_bit_by_bit_under_the_keys_of_this_node(
    nodes: Callable[..., Node], shapes: list[LayerShape]
) -> None:
    source, client = nodes(shapes), nodes(shapes)
    fill_random(client)
    source.remember()
    assert client.keys() != source.keys(), "each node hashes with its own secret"
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys())
    check_equal(client, source)
    size = NUM_BLOCKS * source.units.blocks.num_bytes + source.units.states.num_bytes
    assert client.outcomes() == {"whole": 1}
    assert client.tiers.figures.peer_fetch_bytes == source.tiers.figures.peer_serve_bytes == size
    assert client.tiers.figures.peer_fetch_s > 0


def test_only_what_is_missing_is_sent_and_a_connection_is_used_again(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    address, size = source.peers.address.address, source.units.blocks.num_bytes
    source.remember(4)
    client.fetch(address)
    [connection] = source.peers._server._connections
    source.remember(6)
    fetch = client.fetch(address)
    assert fetch.keys == set(client.keys()[4:]) and client.tiers.figures.peer_fetch_bytes == 6 * size
    client.fetch(address)
    assert client.outcomes() == {"whole": 2}, "a prefix that is here is not requested"
    other = [3] * 24
    source.remember(6, other)
    fetch = client.fetch(address, other, num_cached=5)
    assert fetch.keys == {client.keys(other)[5]}, "the device has the others"
    assert source.peers._server._connections == {connection}


def test_blocks_that_the_other_node_is_saving_are_waited_for(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, client = nodes(), nodes()
    address, blocks = source.peers.address.address, source.tiers._tiers[0].blocks
    monkeypatch.setattr(peer_server, "AWAIT_S", 0.01)
    assert not client.fetch(address, num_awaited=NUM_BLOCKS).keys and client.outcomes() == {"empty": 1}
    monkeypatch.setattr(peer_server, "AWAIT_S", 30)
    monkeypatch.setattr(frames, "STALL_S", 60)
    is_asked, has = threading.Event(), blocks.has

    def has_noted(key: bytes) -> bool:
        is_asked.set()
        return has(key)

    monkeypatch.setattr(blocks, "has", has_noted)
    fetch = FetchJob(address, TOKENS, ROOT_KEY, num_awaited=NUM_BLOCKS)
    client.tiers.fetch(fetch)
    assert is_asked.wait(30)
    source.remember()
    client.until(lambda: fetch in client.tiers.finished())
    assert fetch.keys == set(client.keys())


def test_a_state_is_fetched_without_blocks_and_an_older_one_is_not(nodes: Callable[..., Node]) -> None:
    source, client = nodes(), nodes()
    address = source.peers.address.address
    source.remember(5)
    fetch = client.fetch(address, num_cached=6)
    assert not fetch.keys and client.tiers.has(client.keys()[4], is_state=True)
    assert client.fetch(address, [*TOKENS[:20], 1, 2, 3, 4], num_cached=5, newest_state=5).keys == set()
    assert client.outcomes() == {"whole": 1, "empty": 1}


def test_a_peer_that_has_nothing_or_only_blocks_without_their_state_sends_nothing(
    nodes: Callable[..., Node],
) -> None:
    source, client = nodes(), nodes()
    client.fetch(source.peers.address.address)
    source.do(SaveJob(0, source.keys()[0]))
    client.fetch(source.peers.address.address)
    assert client.outcomes() == {"empty": 2} and client.tiers.figures.peer_fetch_bytes == 0


def test_a_damaged_record_of_the_source_is_not_sent(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember()
    store = source.tiers._tiers[0].blocks
    found = store._find(source.keys()[3])
    assert found is not None
    at = store._records_at + found[0] * store.record_bytes + 40
    os.pwrite(store._fd, bytes([os.pread(store._fd, 1, at)[0] ^ 1]), at)
    fetch = client.fetch(source.peers.address.address)
    assert fetch.keys == set(client.keys()[:3]) and client.outcomes() == {"whole": 1}
    assert not source.tiers.has(source.keys()[3]), "it is erased, as if it had been read here"
    check_equal(client, source, 3)


def test_records_of_a_forgotten_generation_are_not_sent(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    address = source.peers.address.address
    source.remember()
    client.tiers.forget(5)
    assert not client.fetch(address).keys, "the order has not reached the source yet"
    source.tiers.forget(5)
    assert not client.fetch(address).keys
    source.remember()
    assert client.fetch(address).keys == set(client.keys())
    source.tiers.forget(6)
    source.remember()
    assert client.fetch(address, TOKENS).keys == set(), "everything is here already"
    assert nodes(PLAIN).fetch(address).keys, (
        "a node that missed the orders may use what was computed after them"
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"secret": b"another"}, "closed the connection"),
        ({"model": b"x" * 32}, "another model, checkpoint or cache layout"),
        ({"software": b"x" * 32}, "other versions of software"),
        ({"shapes": SHAPES}, "another model, checkpoint or cache layout"),
    ],
    ids=["secret", "model", "software", "size"],
)
def test_a_stranger_gets_nothing_and_the_reason_is_logged(
    nodes: Callable[..., Node], caplog: pytest.LogCaptureFixture, other: dict[str, Any], message: str
) -> None:
    source, client = nodes(PLAIN), nodes(**{"shapes": PLAIN, **other})
    source.remember()
    for _ in range(2):
        client.forget_peers()
        client.fetch(source.peers.address.address)
    assert client.outcomes() == {"failed": 2} and client.tiers.figures.peer_fetch_bytes == 0
    assert source.tiers.figures.peer_serve_bytes == 0 and message in caplog.text


def test_a_server_that_does_not_know_the_secret_is_not_believed(nodes: Callable[..., Node]) -> None:
    """It accepts every client, so the client must notice."""
    client = nodes(PLAIN)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                frames.receive(connection, frames._HELLO.size, time.monotonic() + 5)
                connection.sendall(frames._REPLY.pack(0, bytes(32)))
                frames.receive(connection, 32, time.monotonic() + 5)
                connection.sendall(bytes(32))
                connection.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        client.fetch(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join(10)
    assert client.outcomes() == {"failed": 1} and client.peers._links.popitem()[1]._last_problem == (
        "it does not belong to this service"
    )


def test_garbage_and_silent_or_slow_clients_cost_only_their_connections(
    nodes: Callable[..., Node], stall_s: float
) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember()
    host, _, port = source.peers.address.address.rpartition(":")
    generator = random.Random(3)
    hello = frames._HELLO.pack(frames._MAGIC, frames._VERSION, source.peers._side.meaning, bytes(32))
    other_version = frames._HELLO.pack(
        frames._MAGIC, frames._VERSION + 1, source.peers._side.meaning, bytes(32)
    )
    contents = (
        b"", b"GET / HTTP/1.1\r\n\r\n", generator.randbytes(10_000), hello, hello + bytes(32), hello[:20], other_version
    )  # fmt: skip
    strangers = []
    for content in contents:
        stranger = socket.create_connection((host, int(port)), timeout=10)
        stranger.sendall(content)
        strangers.append(stranger)
    channel = Channel.connect(
        source.peers.address.address, SECRET, source.peers._side.meaning, time.monotonic() + 5
    )
    channel._socket.sendall(struct.pack("<16sQIII", bytes(16), 0, 1 << 31, 0, 0))  # too many tokens
    slow = Channel.connect(
        source.peers.address.address, SECRET, source.peers._side.meaning, time.monotonic() + 5
    )
    slow._socket.sendall(bytes(10))  # a part of a request
    assert client.fetch(source.peers.address.address).keys == set(client.keys())
    source.until(lambda: len(source.peers._server._connections) == 1)  # that of the client
    for stranger in strangers:
        stranger.close()
    channel.close()
    slow.close()


def test_a_client_that_does_not_read_is_dropped(nodes: Callable[..., Node], stall_s: float) -> None:
    wide = [LayerShape(num_kv_heads=8, key_dim=512, value_dim=512)]  # blocks of 512 KiB
    source = nodes(wide, host_bytes=128 << 20)
    tokens, count = [place % 50 for place in range(4 * 120)], 120
    source.remember(count, tokens)
    slow = Channel.connect(
        source.peers.address.address, SECRET, source.peers._side.meaning, time.monotonic() + 5
    )
    request = frames.PrefixRequest(ROOT_KEY, 0, array("I", tokens), 0, 0)
    assert slow.request(request, time.monotonic() + 5).end == count
    source.until(lambda: not source.peers._server._connections)
    assert source.tiers.figures.peer_serve_bytes < count * source.units.blocks.num_bytes
    slow.close()


def test_more_connections_than_allowed_are_closed(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "MOST_CONNECTIONS", 2)
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember()
    address, meaning = source.peers.address.address, source.peers._side.meaning
    held = [Channel.connect(address, SECRET, meaning, time.monotonic() + 5) for _ in range(2)]
    client.fetch(address)
    assert client.outcomes() == {"failed": 1}
    for each in held:
        each.close()
    source.until(lambda: not source.peers._server._connections)
    client.forget_peers()
    assert client.fetch(address).keys


def test_a_connection_that_the_server_has_closed_is_opened_again(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    address = source.peers.address.address
    source.remember(3)
    client.fetch(address)
    [connection] = source.peers._server._connections
    connection.shutdown(socket.SHUT_RDWR)
    source.until(lambda: not source.peers._server._connections)
    source.remember(6)
    assert client.fetch(address).keys == set(client.keys()[3:])
    assert client.outcomes() == {"whole": 2}


def test_a_peer_that_is_gone_is_avoided_for_a_while(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember(3)
    client.fetch(source.peers.address.address)
    source.peers.close()
    for _ in range(3):
        client.fetch(source.peers.address.address)
    assert client.outcomes() == {"whole": 1, "failed": 1, "declined": 2}


def fetch_and_leave(client: Node, address: str) -> FetchJob:
    """Fetch a prefix that is unwanted as soon as its first record is there, and wait for the end."""
    fetch, keep = FetchJob(address, TOKENS, ROOT_KEY), client.tiers.keep

    def keep_and_leave(*arguments: Any, **options: Any) -> bool:
        fetch.is_unwanted = True
        return keep(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.tiers, "keep", keep_and_leave)
        client.tiers.fetch(fetch)
        client.until(lambda: fetch in client.tiers.finished())
    return fetch


def test_an_unwanted_fetch_ends_early_and_the_next_one_works(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember()
    fetch = fetch_and_leave(client, source.peers.address.address)
    assert len(fetch.keys) == 1
    assert client.fetch(source.peers.address.address).keys == set(client.keys()[1:])
    check_equal(client, source)


class FlippingProxy:
    """Passes bytes between one client and a server, and changes one byte of one direction."""

    def __init__(self, address: str, *, to_client: bool, at: int) -> None:
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.has_flipped = False
        self._upstream = (host, int(port))
        self._to_client, self._at = to_client, at
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(self._upstream, timeout=10)
        back = threading.Thread(target=self._pass, args=(server, client, self._to_client))
        back.start()
        self._pass(client, server, not self._to_client)
        back.join()
        client.close()
        server.close()

    def _pass(self, source: socket.socket, target: socket.socket, flips: bool) -> None:
        num_passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                if flips and num_passed <= self._at < num_passed + len(data):
                    data[self._at - num_passed] ^= 1 << self._at % 8
                    self.has_flipped = True
                num_passed += len(data)
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(10)


@pytest.mark.crossed("to_client", every=2)
@pytest.mark.parametrize("to_client", [True, False], ids=["answers", "requests"])
def test_every_byte_that_is_changed_in_transit_is_noticed(
    nodes: Callable[..., Node], stall_s: float, to_client: bool
) -> None:
    source = nodes()
    source.remember()
    other = [*TOKENS[:20], 9, 9, 9, 9]  # a similar prefix must not be mistaken for the requested one
    source.do(SaveJob(0, source.keys(other)[5]))
    source.do(SaveJob(2, source.keys(other)[5], is_state=True))
    sizes = source.units.blocks.num_bytes, source.units.states.num_bytes
    request = frames._HELLO.size + 32 + frames._REQUEST.size + 4 * len(TOKENS) + 32
    greeting = frames._REPLY.size + 32 + frames._ANSWER.size + 32
    answer = greeting + NUM_BLOCKS * (12 + sizes[0]) + 12 + sizes[1] + 12
    generator = random.Random(8)
    # Half of the positions of answers are outside of the long records.
    places = [generator.randrange(answer) for _ in range(50)] + [
        generator.randrange(greeting + 12) for _ in range(50)
    ]
    if not to_client:
        places = [generator.randrange(request) for _ in range(100)]
    num_noticed = num_faults = num_stalls = 0
    while places:
        client = Node()
        fill_random(client)
        proxy = FlippingProxy(source.peers.address.address, to_client=to_client, at=places[-1])
        fetch = client.fetch(proxy.address)
        outcomes = client.outcomes()
        # On a busy machine, the fetch may end before that byte.
        if not proxy.has_flipped and num_stalls < 5:
            num_stalls += 1
            client.close()
            proxy.close()
            continue
        assert proxy.has_flipped, places[-1]
        places.pop()
        num_noticed += outcomes == {"failed": 1}
        num_faults += client.tiers.figures.num_faults
        for number, key in enumerate(client.keys()):
            if key in fetch.keys:  # a record before the changed byte
                client.do(LoadJob([key], [7]))
                assert client.record(7) == source.record(number)
        client.close()
        proxy.close()
    assert num_noticed == 100
    assert num_faults > 20 or not to_client


def test_what_arrives_before_a_changed_byte_is_right(nodes: Callable[..., Node], stall_s: float) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    fill_random(client)
    source.remember()
    record = 12 + source.units.blocks.num_bytes
    at = frames._REPLY.size + 32 + frames._ANSWER.size + 32 + 3 * record + record // 2
    proxy = FlippingProxy(source.peers.address.address, to_client=True, at=at)
    fetch = client.fetch(proxy.address)
    assert fetch.keys == set(client.keys()[:3])
    assert client.tiers.figures.num_faults == 1 and client.outcomes() == {"failed": 1}
    check_equal(client, source, 3)
    assert not client.tiers.has(client.keys()[3])
    client.forget_peers()
    client.fetch(source.peers.address.address)
    check_equal(client, source)
    proxy.close()


def serve_node(pipe: Connection, stops_after: int) -> None:
    """Serve a prefix from a process. If `stops_after` is not 0, stop in the middle of an answer, with a record half sent."""
    node = Node(PLAIN)
    node.remember()
    send, num_sent = Channel.send_record, 0

    def send_some(self: Channel, header: frames.RecordHeader, record: memoryview) -> None:
        nonlocal num_sent
        if num_sent == stops_after and stops_after:
            frames._RECORD.pack_into(record, 0, *header)
            self._socket.sendall(record[: len(record) // 2])
            pipe.send("stopped")
            threading.Event().wait()
        num_sent += 1
        send(self, header, record)

    Channel.send_record = send_some  # type: ignore[method-assign]
    pipe.send((node.peers.address.address, [node.record(number) for number in range(NUM_BLOCKS)]))
    pipe.recv()


def fetch_often(pipe: Connection, address: str, count: int) -> None:
    """Fetch a prefix in new nodes, again and again, and send what arrived."""
    records: list[list[bytes]] = []
    for _ in range(count):
        node = Node(PLAIN)
        fill_random(node)
        node.fetch(address)
        load = LoadJob(node.keys(), list(range(NUM_BLOCKS)))
        node.do(load)
        records.append([node.record(number) for number in range(load.num_loaded)])
        node.close()
    pipe.send(records)


def started(target: Callable[..., None], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process with a pipe."""
    context = rank_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def test_a_server_that_is_killed_in_the_middle_of_an_answer_costs_nothing_but_the_rest(
    nodes: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        frames, "STALL_S", 60
    )  # a busy machine must not end the transfer before the server does
    monkeypatch.setattr(peer_link, "MOST_LOAD_S", 60)
    process, pipe = started(serve_node, 3)
    address, records = pipe.recv()
    client = nodes(PLAIN)
    fill_random(client)
    fetch = FetchJob(address, TOKENS, ROOT_KEY)
    client.tiers.fetch(fetch)
    assert pipe.poll(60) and pipe.recv() == "stopped"
    os.kill(process.pid, signal.SIGKILL)
    begun_s = time.monotonic()
    client.until(lambda: fetch in client.tiers.finished())
    assert time.monotonic() - begun_s < 30, "a closed connection is noticed at once"
    assert client.outcomes() == {"failed": 1} and fetch.keys == set(client.keys()[:3])
    client.do(load := LoadJob(client.keys(), list(range(NUM_BLOCKS))))
    assert load.num_loaded == 3 and [client.record(number) for number in range(3)] == records[:3]
    process.join(10)


def test_a_server_that_hangs_in_the_middle_of_an_answer_is_left(
    nodes: Callable[..., Node], stall_s: float
) -> None:
    process, pipe = started(serve_node, 2)
    address, _ = pipe.recv()
    client = nodes(PLAIN)
    begun_s = time.monotonic()
    assert client.fetch(address).keys == set(client.keys()[:2])
    assert time.monotonic() - begun_s < MOST_LOAD_S and client.outcomes() == {"failed": 1}
    process.kill()
    process.join(10)


@pytest.mark.slow
def test_a_storm_of_processes_gets_the_right_bytes() -> None:
    server, pipe = started(serve_node, 0)
    address, records = pipe.recv()
    storm = [started(fetch_often, address, 10) for _ in range(6)]
    for process, answers in storm:
        assert answers.recv() == [records] * 10
        process.join(10)
    pipe.send("end")
    server.join(10)


def test_a_fetch_pays_if_it_is_predicted_to_be_faster_than_computing() -> None:
    pace = TransferPace()

    def pays(
        num_bytes: int, num_tokens: int, token_s: float, *, now_s: float = 0.0, left_s: float = 3.0
    ) -> bool:
        return pace.pays(num_bytes, num_tokens, token_s, left_s=left_s, now_s=now_s)

    assert pays(1 << 40, 1, 1e-9), "the first one is tried"
    assert not pays(1, 1, 1.0, left_s=0.0)
    pace.note(5_000_000, 0.5, 0.05, now_s=0.0)  # 10 MB/s
    assert pays(1_000_000, 100, 0.01)
    assert not pays(1_000_000, 100, 0.001), "0.15 s against 0.1 s"
    assert not pays(40_000_000, 10_000, 1.0), "it would take longer than it may"
    assert pays(1_000_000, 100, 0.0), "the time of a token is unknown"
    pace.note(0, 1.0, 1.0, now_s=1.0)
    assert pays(1_000_000, 100, 0.01), "an empty answer has no rate"
    for _ in range(20):
        pace.note(1_000_000, 0.01, 0.001, now_s=1.0)
    assert pays(1_000_000, 100, 0.001, now_s=1.0), "the link has become faster"
    pace.note(1_000_000, 1000.0, 0.0, now_s=1.0)
    pace.avoid(2.0)
    assert not pays(1, 1000, 1.0, now_s=2.0 + peer_link.AVOID_S - 0.1)
    assert pays(1, 1000, 1.0, now_s=2.0 + peer_link.AVOID_S)
    assert pays(1 << 40, 1, 1e-9, now_s=1.1 + MEASURE_AGAIN_S), "an old rate counts as unknown"


def test_a_small_transfer_that_was_slow_by_chance_does_not_rule_out_a_large_one() -> None:
    pace = TransferPace()

    def pays(num_bytes: int) -> bool:
        return pace.pays(num_bytes, 1000, 0.0, left_s=2.5, now_s=0.0)

    pace.note(1_000_000, 0.02, 0.0, now_s=0.0)  # 50 MB/s: 8 MB take 0.16 s, 127 MB would take 2.54 s
    assert pays(127_000_000)
    pace.note(127_000_000, 2.5, 0.0, now_s=0.0)
    assert not pays(127_000_000), "it was measured with as many bytes"
    slow = TransferPace()
    slow.note(1_000_000, 0.6, 0.0, now_s=0.0)
    assert not slow.pays(127_000_000, 1000, 0.0, left_s=2.5, now_s=0.0), "that long is not by chance"
    slow.note(1_000, 0.001, 0.0, now_s=2 * MEASURE_AGAIN_S)
    assert slow.pays(127_000_000, 1000, 0.0, left_s=2.5, now_s=2 * MEASURE_AGAIN_S), "it counts for a minute"


def test_a_slow_peer_is_declined_and_counted(nodes: Callable[..., Node]) -> None:
    source, client = nodes(PLAIN), nodes(PLAIN)
    source.remember(3)
    client.fetch(source.peers.address.address)
    client.tiers.prompt_token_s = 1e-12
    source.remember(6)
    assert not client.fetch(source.peers.address.address).keys
    assert client.outcomes() == {"whole": 1, "declined": 1}


def test_closing_ends_all_threads_and_descriptors() -> None:
    def threads() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))

    before, descriptors = threads(), len(os.listdir("/proc/self/fd"))
    source, client = Node(PLAIN), Node(PLAIN)
    source.remember()
    client.fetch(source.peers.address.address)
    client.close()
    source.close()
    assert threads() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
