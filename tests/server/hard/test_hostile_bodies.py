"""The worst possible bodies, by name. Each is a 4xx or a right answer, in bounded time and memory, without harm to others."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.serving.processes import cpu_s
from server.http.json_text import MAX_JSON_KEYS, MAX_JSON_NODES
from tests.support.requests.hostile_values import PLANES
from tests.support.requests.mutations import RawRequest
from tests.support.requests.raw_http import RawAnswer, RawClient
from tests.support.service.paced_front import PacedFront
from tests.support.service.process_figures import peak_rss_bytes, reset_peak, rss_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TIMEOUT_S = 60.0
# For ten megabytes of JSON; measured: 2.8 for 3.5 million lists. CPU time, because other processes use the cores, too.
MOST_CPU_S = 8.0
GROWTH_BYTES = 320 << 20  # for ten megabytes of JSON: 5 million Python objects are 160 MB
MEGABYTES = 10 << 20
MOST_PAUSE_S = 0.25
HELLO = [{"role": "user", "content": "hello"}]
Body = Callable[[], bytes]


def chat(**fields: Any) -> Body:
    return lambda: json.dumps({"messages": HELLO, "max_tokens": 2, **fields}).encode()


def completion(**fields: Any) -> Body:
    return lambda: json.dumps({"prompt": "hello", "max_tokens": 2, **fields}).encode()


def raw(text: str | bytes) -> Body:
    return lambda: text.encode() if isinstance(text, str) else text


def with_raw(name: str, value: str) -> Body:
    return lambda: (
        b'{"messages": [{"role": "user", "content": "x"}], "%s": %s}' % (name.encode(), value.encode())
    )


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


SMALL: dict[str, tuple[str, Body]] = {
    "100,000 open brackets": (CHAT, raw("[" * 100_000)),
    "100,000 levels of lists": (CHAT, with_raw("stop", nested(100_000))),
    "100,000 levels of objects": (CHAT, with_raw("x", '{"a":' * 100_000 + "1" + "}" * 100_000)),
    "900 levels in a message": (CHAT, with_raw("messages", f'[{{"role":"user","content":{nested(900)}}}]')),
    "300 levels in an unknown key": (CHAT, with_raw("made_up", nested(300))),
    "200 levels instead of a number": (CHAT, with_raw("temperature", nested(200))),
    "minus Infinity as a seed": (CHAT, with_raw("seed", "-Infinity")),
    "a number of 5,000 digits": (CHAT, with_raw("max_tokens", "1" * 5000)),
    "a number of 4,000 digits": (CHAT, with_raw("max_tokens", "1" * 4000)),
    "a float of 4,000 digits": (CHAT, with_raw("temperature", "9" * 4000)),
    "n of 10**18": (CHAT, chat(n=10**18)),
    "top_logprobs of 10**9": (CHAT, chat(logprobs=True, top_logprobs=10**9)),
    "100,000 stop strings": (CHAT, chat(stop=["x"] * 100_000)),
    "a stop string of 1 MB": (CHAT, chat(stop="x" * 1_000_000)),
    "100,000 stop token ids": (CHAT, chat(stop_token_ids=[1] * 100_000)),
    "100,000 wrong stop token ids": (CHAT, chat(stop_token_ids=["x"] * 100_000)),
    "100,000 wrong messages": (CHAT, chat(messages=[0] * 100_000)),
    "200,000 tiny messages": (CHAT, chat(messages=[{"role": "user", "content": "a"}] * 200_000)),
    "200,000 tiny messages of Anthropic's": (
        "/v1/messages",
        chat(messages=[{"role": "user", "content": "a"}] * 200_000),
    ),
    "200,000 tiny parts": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 200_000}]),
    ),
    "128 prompts of 19,999 characters": (COMPLETIONS, completion(prompt=["the cat " * 2499] * 128)),
    "100,000 prompts": (COMPLETIONS, completion(prompt=["a"] * 100_000)),
    "100,000 wrong prompts": (COMPLETIONS, completion(prompt=[None] * 100_000)),
    "100,000 unknown keys": (CHAT, lambda: json.dumps({str(key): 0 for key in range(100_000)}).encode()),
    "a model's name of 1 MB": (CHAT, chat(model="m" * 1_000_000)),
    "a role of 1 MB": (CHAT, chat(messages=[{"role": "r" * 1_000_000, "content": "x"}])),
    "a part's type of 1 MB": (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "t" * 1_000_000}]}]),
    ),
    "half a surrogate pair in a prompt": (COMPLETIONS, completion(prompt="a\ud800")),
    "half a surrogate pair in a model's name": (CHAT, chat(model="\udfff")),
    "half a surrogate pair in a stop string": (CHAT, chat(stop="\ud800")),
    "half a surrogate pair as a key": (CHAT, chat(**{"\ud800": 1})),
    "keys twice": (
        CHAT,
        raw('{"messages": 1, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'),
    ),
}
LARGE: dict[str, tuple[str, Body]] = {
    "a prompt of 10 MB": (COMPLETIONS, completion(prompt="the cat sat on " * (MEGABYTES // 15))),
    "a message of 10 MB": (CHAT, chat(messages=[{"role": "user", "content": "\u20ac " * (MEGABYTES // 8)}])),
    "5 million token ids": (COMPLETIONS, completion(prompt=[5] * (MEGABYTES // 3))),
    "5 million wrong messages": (CHAT, raw(b'{"messages": [' + b"0," * (MEGABYTES // 2) + b"0]}")),
    "5 million empty lists": (CHAT, raw(b'{"stop": [' + b"[]," * (MEGABYTES // 3) + b"[]]}")),
    "5 million wrong token ids": (CHAT, raw(b'{"stop_token_ids": [' + b'"",' * (MEGABYTES // 3) + b'""]}')),
    "10 MB of one string": (CHAT, chat(user="x" * MEGABYTES)),
    "10 MB of escapes": (CHAT, lambda: b'{"user": "' + b"\\u0041" * (MEGABYTES // 6) + b'"}'),
    "10 MB of blanks": (CHAT, lambda: b" " * MEGABYTES),
    "10 MB of brackets": (CHAT, lambda: b"[" * MEGABYTES),
    "10 MB of zeros": (CHAT, lambda: b"\0" * MEGABYTES),
    "16 MB that nest 99 deep": (
        CHAT,
        lambda: b'{"x": [' + (b"[" * 97 + b"]" * 97 + b",") * (16 * MEGABYTES // 10 // 195) + b"0]}",
    ),
    "as many arrays as are taken": (
        CHAT,
        lambda: b'{"messages": [], "x": [' + b"[]," * (MAX_JSON_NODES - 3) + b"0]}",
    ),
    "10 MB of unknown keys": (CHAT, lambda: json.dumps({str(key): 0 for key in range(800_000)}).encode()),
}


@pytest.fixture
def client(hard_front: PacedFront) -> Iterator[RawClient]:
    connection = RawClient(hard_front.url, timeout_s=TIMEOUT_S)
    yield connection
    connection.close()


def check(answer: RawAnswer) -> None:
    """Check for an acceptable answer: 200, or a short error in OpenAI's, Anthropic's or Ollama's format."""
    if answer.status == 200:
        return
    assert 400 <= answer.status < 500, answer
    body = json.loads(answer.body)
    error = body["error"]
    is_text = isinstance(error, str)  # Ollama's
    assert error if is_text else error["message"]
    assert is_text or body.get("type") == "error" or error["code"] == answer.status
    assert len(answer.body) < 6000, "errors quote little of the body"


@pytest.mark.crossed("name", every=2)
@pytest.mark.parametrize("name", SMALL)
def test_a_hostile_body_is_refused_or_answered(hard_front: PacedFront, client: RawClient, name: str) -> None:
    path, make = SMALL[name]
    before_s = cpu_s(hard_front.process.pid)
    check(client.send(RawRequest(path=path, body=make())))
    assert cpu_s(hard_front.process.pid) - before_s < MOST_CPU_S / 4


def keys(count: int) -> str:
    return "{" + ",".join(f'"{number:07}":1' for number in range(count)) + "}"


NUM_KEYS = 600_000  # this many used to block the event loop for 0.7 s
# A field of a chat, and its JSON. Functions, because megabytes of text take time when all tests are collected.
QUICK: dict[str, tuple[str, Callable[[], str]]] = {
    "too many keys": ("x", lambda: keys(NUM_KEYS)),
    "as many keys as are taken": ("chat_template_kwargs", lambda: keys(MAX_JSON_KEYS - 9)),
    "keys in a schema's text": ("guided_json", lambda: json.dumps('{"properties": ' + keys(NUM_KEYS) + "}")),
    "arrays": ("x", lambda: "[" + "[]," * (MAX_JSON_NODES - 9) + "0]"),
}


@pytest.mark.parametrize("name", QUICK)
def test_a_hostile_body_delays_others_by_less_than_a_quarter_of_a_second(
    hard_front: PacedFront, client: RawClient, name: str
) -> None:
    """The best of up to three tries counts, because the machine may be busy. test_pauses.py has all attacks, with streams."""
    field, make = QUICK[name]
    request = RawRequest(path=CHAT, body=with_raw(field, make())())
    longest_s: list[float] = []
    while not longest_s or (min(longest_s) >= MOST_PAUSE_S and len(longest_s) < 3):
        with Pings(hard_front) as pings:
            check(client.send(request))
        longest_s.append(pings.longest_s)
    assert min(longest_s) < MOST_PAUSE_S


@pytest.mark.parametrize("streams", [False, True])
def test_characters_of_every_plane_come_back_as_they_were_sent(hard_front: PacedFront, streams: bool) -> None:
    text = PLANES[:1] + "".join(char for char in PLANES[1:] if not 0xD800 <= ord(char) < 0xE000)
    num_tokens = len(hard_front.encode(text))
    with_end = {"prompt": text, "max_tokens": 1, "echo": True, "stream": streams}
    answer = hard_front.post(COMPLETIONS, json=with_end)
    assert answer.status_code == 200 and num_tokens > 4 * 16
    if streams:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        shown = "".join(choice["text"] for each in events for choice in each["choices"])
    else:
        shown = answer.json()["choices"][0]["text"]
    assert shown.startswith(text)


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.slow
def test_ten_megabytes_cost_bounded_time_and_memory(
    hard_front: PacedFront, client: RawClient, name: str
) -> None:
    path, make = LARGE[name]
    pid, body = hard_front.process.pid, make()
    reset_peak(pid)
    before, before_s = rss_bytes(pid), cpu_s(pid)
    with Pings(hard_front) as pings:
        check(client.send(RawRequest(path=path, body=body)))
    assert cpu_s(pid) - before_s < MOST_CPU_S
    growth = peak_rss_bytes(pid) - before
    assert growth < GROWTH_BYTES, f"{growth >> 20} MiB for {len(body) >> 20} MiB"
    assert pings.longest_s < TIMEOUT_S / 2, "other requests wait too long"


@pytest.mark.slow
def test_many_large_bodies_one_after_the_other_do_not_add_up(
    hard_front: PacedFront, client: RawClient
) -> None:
    pid, body = hard_front.process.pid, LARGE["a prompt of 10 MB"][1]()
    sizes = []
    for _ in range(12):
        check(client.send(RawRequest(path=COMPLETIONS, body=body)))
        sizes.append(rss_bytes(pid))
    assert sizes[-1] - sizes[3] < 64 << 20, [size >> 20 for size in sizes]


class Pings:
    """Request /ping continuously from another client. On exit, `longest_s` is the longest response time."""

    def __init__(self, front: PacedFront) -> None:
        self.longest_s = 0.0
        self._front, self._ended = front, threading.Event()
        self._thread = threading.Thread(target=self._ping, daemon=True)

    def __enter__(self) -> "Pings":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(TIMEOUT_S)

    def _ping(self) -> None:
        connection = RawClient(self._front.url, timeout_s=TIMEOUT_S)
        while not self._ended.is_set():
            begun_s = time.monotonic()
            assert connection.send(RawRequest(path="/ping", body=b"")).status == 200
            self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            self._ended.wait(0.01)
        connection.close()
