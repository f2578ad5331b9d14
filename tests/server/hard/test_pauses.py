"""No request may delay another client's stream by more than 250 ms.

Each row of ATTACKS is an input that caused a pause, or might. It is sent while eight streams run, and their longest pause is
compared with that of a phase without it, on the same machine. A quiet phase counts for all first tries, since its pause then does
not matter; other phases are just before their try. The front is real. The ranks have no model and run
in separate processes, so that only the front is measured. To add a finding, add a row: a name and the requests of its clients,
which are sent concurrently, each on its own connection.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from benchmarks.serving.front_alone import FrontAlone
from server.http.json_text import MAX_JSON_KEYS, MAX_JSON_NODES
from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.pauses import Pauses
from tests.support.service.process_figures import rss_bytes
from tests.support.service.quiet import Measured, expect_good

MOST_S = 0.25
MOST_TIMES_CONTROL = 3  # for machines on which streams pause without an attack
QUIET_TRIES = 3
CONTROL_S = 1.5
ATTACK_S = 2.0  # minimum: late effects count
TIMEOUT_S = 60.0
MOST_GROWTH_BYTES = 700 << 20
STEP_S = 0.02
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]


class Client(NamedTuple):
    """The request of one client."""

    path: str
    body: bytes
    announced: int | None = None  # a body's announced length, if only a part of it is sent
    headers: bytes = b"content-type: application/json\r\n"
    reads: bool = True
    statuses: tuple[int, ...] = (200, 400)  # acceptable statuses


Attack = Callable[[], list[Client]]


def keys(count: int) -> str:
    return "{" + ",".join(f'"{number:08}":1' for number in range(count)) + "}"


def chat(extra: str, *, message: str = "") -> bytes:
    return b'{"messages": [{"role": "user", "content": "a"%s}], "max_tokens": 1%s}' % (
        message.encode(),
        extra.encode(),
    )


def fields(path: str, **given: Any) -> Client:
    return Client(path, json.dumps(given).encode())


def tool(properties: str) -> str:
    schema = '{"type": "object", "properties": ' + properties + "}"
    return ', "tools": [{"type": "function", "function": {"name": "f", "parameters": ' + schema + "}}]"


def arguments(text: str) -> bytes:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]
    return json.dumps({"messages": messages, "max_tokens": 1}).encode()


MANY, MOST = 1_900_000, MAX_JSON_KEYS - 100  # a refused number, and nearly the largest accepted one
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 20, "return_text_in_logprobs": True}
ATTACKS: dict[str, Attack] = {
    "1: bodies to /ping that do not end": lambda: [
        Client("/ping", bytes(31 << 20), announced=32 << 20) for _ in range(12)
    ],
    "1: bodies that do not end": lambda: [
        Client(COMPLETIONS, bytes(31 << 20), announced=32 << 20, reads=False) for _ in range(12)
    ],
    "1: bodies that are whole": lambda: [
        Client(COMPLETIONS, json.dumps({"prompt": "x" * (30 << 20)}).encode(), statuses=(400, 503))
        for _ in range(12)
    ],
    "4: prompt_logprobs times n, too many": lambda: [
        fields(COMPLETIONS, prompt=[7] * 3900, max_tokens=1, n=32, prompt_logprobs=20)
    ],
    # Only one client: the model-less rank takes 80 ms to make its log-probabilities, which delays its streams.
    "4: prompt_logprobs times n, as many as may be": lambda: [
        fields(COMPLETIONS, prompt=[7] * 3900, max_tokens=1, n=12, prompt_logprobs=20)
    ],
    "4: echo with logprobs times n": lambda: [
        fields(COMPLETIONS, prompt=[7] * 3900, max_tokens=1, n=12, echo=True, logprobs=20)
    ],
    "5: silent connections": lambda: [Client("", b"") for _ in range(400)],
    "7: streams that repeat their logprobs": lambda: [
        fields(
            GENERATE,
            input_ids=[7] * 10,
            stream=True,
            sampling_params={"max_new_tokens": 400, "ignore_eos": True, "n": 4},
            **LOGPROBS,
        )
        for _ in range(4)
    ],
    "8: 1.9 million keys": lambda: [Client(CHAT, chat(f', "zz": {keys(MANY)}')) for _ in range(2)],
    "8: as many keys as are taken": lambda: [Client(CHAT, chat(f', "zz": {keys(MOST)}')) for _ in range(6)],
    "8: keys of the template": lambda: [Client(CHAT, chat(f', "chat_template_kwargs": {keys(MOST)}'))],
    "8: keys of the request": lambda: [Client(CHAT, chat(f", {keys(MOST)[1:-1]}"))],
    "8: keys of a message": lambda: [Client(CHAT, chat("", message=f", {keys(MOST)[1:-1]}"))],
    "8: properties of a tool": lambda: [Client(CHAT, chat(tool(keys(MOST))))],
    "8: keys in a call's arguments": lambda: [Client(CHAT, arguments(keys(MANY)))],
    "8: keys in a schema's text": lambda: [
        fields(CHAT, messages=HELLO, max_tokens=1, guided_json='{"properties": ' + keys(MANY) + "}")
    ],
    "8: values of a schema": lambda: [
        fields(CHAT, messages=HELLO, max_tokens=1, guided_json={"enum": [7] * MANY}),
        Client(CHAT, chat(tool('{"a": {"enum": [0' + ",7" * MANY + "]}}"))),
    ],
    "8: two million token ids": lambda: [
        fields(COMPLETIONS, prompt=[7] * 1_900_000, max_tokens=1, truncate_prompt_tokens=100),
        fields("/detokenize", tokens=[7] * 1_900_000),
        fields(GENERATE, input_ids=[7] * 1_900_000),
    ],
    "8: as many arrays as are taken": lambda: [
        Client(CHAT, chat(', "x": [%s0]' % ("[]," * (MAX_JSON_NODES - 5))))
    ],
    "8: ten thousand messages": lambda: [fields(CHAT, messages=HELLO * 10_000, max_tokens=1)],
    "8: many choices of a long prompt": lambda: [
        fields(COMPLETIONS, prompt=[7] * 3900, max_tokens=1, n=128) for _ in range(2)
    ],
    "14a: a long Content-Type": lambda: [
        Client(
            "/v1/files", b"--x--", headers=b'content-type: multipart/form-data; x="%s\r\n' % (b";" * 60_000)
        )
    ],
    "14b: clients that do not read": lambda: [
        fields(
            CHAT, messages=HELLO, n=8, max_tokens=300, stream=True, logprobs=True, top_logprobs=20
        )._replace(reads=False)
        for _ in range(10)
    ],
    "12: a key again and again": lambda: [
        fields(COMPLETIONS, prompt="k", max_tokens=50, n=64)._replace(
            headers=b"content-type: application/json\r\nidempotency-key: k\r\n"
        )
        for _ in range(16)
    ],
}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontAlone]:
    """A front with two model-less ranks."""
    folder = tmp_path_factory.mktemp("pauses")
    model = write_tokenizer(folder)
    log = folder / "log"
    with (
        log.open("wb") as out,
        FrontAlone(model, "--max-connections=200", num_ranks=2, step_s=STEP_S, log=out) as alone,
    ):
        yield alone
    assert "Traceback" not in log.read_text(errors="replace")


@pytest.fixture(scope="module")
def first_control_s(front: FrontAlone) -> float:
    """The longest pause of a phase without an attack."""
    return pause_without(("127.0.0.1", front.port))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_streams_do_not_pause_while(front: FrontAlone, first_control_s: float, name: str) -> None:
    """The best of three tries on a quiet machine counts: other load also causes pauses."""
    clients, before, address = ATTACKS[name](), rss_bytes(front.front_pid), ("127.0.0.1", front.port)

    def measure(number: int) -> Measured:
        is_quiet = number == 0 and MOST_TIMES_CONTROL * first_control_s <= MOST_S
        control_s = first_control_s if is_quiet else pause_without(address)
        attacked_s = pause_with(clients, address)
        growth = rss_bytes(front.front_pid) - before
        figures = f"{1000 * attacked_s:.0f} ms, without {1000 * control_s:.0f} ms, {growth >> 20} MiB"
        print(f"{name}: {figures}")
        assert growth < MOST_GROWTH_BYTES
        return Measured(attacked_s < max(MOST_S, MOST_TIMES_CONTROL * control_s), f"streams paused {figures}")

    expect_good(measure, quiet_tries=QUIET_TRIES)


def pause_without(address: tuple[str, int]) -> float:
    """Return the streams' longest pause in a phase without an attack."""
    with Pauses(address) as control:
        time.sleep(CONTROL_S)
    return control.longest_s


def pause_with(clients: list[Client], address: tuple[str, int]) -> float:
    """Return the streams' longest pause in a phase with these clients."""
    with Pauses(address) as attacked, contextlib.ExitStack() as connections:
        begun_s = time.monotonic()
        sent = [
            threading.Thread(target=send, args=(address, each, connections), daemon=True) for each in clients
        ]
        for thread in sent:
            thread.start()
        for thread in sent:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client was not answered"
        time.sleep(max(0.0, begun_s + ATTACK_S - time.monotonic()))
    return attacked.longest_s


def send(address: tuple[str, int], client: Client, connections: contextlib.ExitStack) -> None:
    """Send one client's request, and read its answer if it reads one. Connections stay open until the attack ends."""
    connection = socket.create_connection(address, TIMEOUT_S)
    connections.enter_context(connection)
    if not client.path:
        return
    length = len(client.body) if client.announced is None else client.announced
    head = b"POST %b HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (
        client.path.encode(),
        client.headers,
        length,
    )
    with contextlib.suppress(ConnectionError):  # the server refuses and closes early
        connection.sendall(head + client.body)
    if not client.reads:
        return
    said = b""
    with contextlib.suppress(ConnectionError), connection.makefile("rb") as answer:
        said = answer.readline()
        while not said.startswith(b"HTTP/1.1 "):
            said = answer.readline()
        read_body(answer)
    status = int(said.split()[1]) if said else 0
    assert not said or status in (*client.statuses, 503), said


def read_body(answer: Any) -> None:
    """Read an answer's head and body."""
    head = b""
    while (line := answer.readline()) not in (b"\r\n", b""):
        head += line.lower()
    if b"transfer-encoding: chunked" in head:
        while size := int(answer.readline() or b"0", 16):
            answer.read(size + 2)
    else:
        length = next((line for line in head.splitlines() if line.startswith(b"content-length:")), b":0")
        answer.read(int(length.partition(b":")[2]))
