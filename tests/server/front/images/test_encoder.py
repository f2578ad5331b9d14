"""The client of the encoder process: each image is encoded once, memory is bounded, and a dead process is replaced."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.images import read_rows
from server.front.errors import ApiError
from server.front.images.encoder import EncodedImage, Encoder, EncoderSettings
from server.front.images.seeing import ImageTokens

TIMEOUT_S = 60.0
TOKENS = ImageTokens(9, 9)
WHERE = "messages.0.content.0.image_url.url"
# Answers with as many rows as the file has bytes. The file's first word chooses what happens; "held" waits for a file `released`.
FAKE = """
import json, os, signal, sys, time
import numpy as np
from pathlib import Path
from kvcache.images import write_rows
settings = json.loads(sys.stdin.readline())
log = open(settings["directory"], "a")
print(json.dumps({"meaning": "m1"}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    content = Path(order["content"]).read_bytes()
    print(content.decode(), file=log, flush=True)
    word = content.split()[0].decode()
    if word == "crash":
        os.abort()
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "slow":
        time.sleep(600)
    while word == "held" and not Path(settings["directory"]).with_name("released").exists():
        time.sleep(0.01)
    if word == "failing":
        failure = dict(zip(("failure", "lacks_memory", "is_broken"), json.loads(content[8:])))
        print(json.dumps({"number": order["number"], **failure}), flush=True)
        continue
    if word == "bad":
        print(json.dumps({"number": order["number"], "why_not": "it is bad"}), flush=True)
        continue
    rows = np.full((1, len(content), 4), len(content), np.float32)
    write_rows(order["rows"], order["digest"], rows)
    answer = {"num_rows": len(content), "num_bytes": rows.nbytes, "height": 1, "width": len(content), "part": 0, "columns": 1}
    print(json.dumps({"number": order["number"], **answer, "decode_s": 0, "process_s": 0, "tower_s": 0}), flush=True)
"""


def with_encoder(
    work: Callable[[Encoder], Awaitable[None]], log: Path, *, fake: str = FAKE, cache_bytes: int = 1 << 20
) -> list[str]:
    """Run a test with its own encoder. Return the images that the process got, and check that no process is left."""

    async def run() -> None:
        command = (sys.executable, "-c", fake)
        encoder = Encoder(EncoderSettings(str(log), 1), cache_bytes=cache_bytes, command=command)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await work(encoder)
            pid = encoder._process.pid if encoder._process else None
        finally:
            await encoder.close()
        assert pid is None or not Path(f"/proc/{pid}").exists()

    asyncio.run(run())
    return log.read_text().splitlines() if log.exists() else []


def test_rows_come_back_by_a_path(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        image = await encoder.encode(b"one two", WHERE)
        ids, [placed] = image.placed(5, TOKENS)
        assert ids == [9] * 7
        assert (placed.start, placed.length, placed.height, placed.width) == (5, 7, 1, 7)
        [read] = read_rows([placed], 4)
        assert read.rows is not None and read.rows.shape == (1, 7, 4) and (read.rows == 7).all()

    assert with_encoder(work, tmp_path / "log") == ["one two"]


def test_an_image_with_lines_has_a_range_for_each_and_a_token_after_it() -> None:
    answer = {"num_rows": 6, "num_bytes": 0, "height": 0, "width": 0, "part": 3, "columns": 1}
    times = dict.fromkeys(("decode_s", "process_s", "tower_s"), 0.0)
    image = EncodedImage(os.memfd_create("rows"), "ab" * 32, {**answer, **times})
    ids, ranges = image.placed(5, TOKENS._replace(after_line=(7,), after=(8,)))
    assert ids == [9, 9, 9, 7, 9, 9, 9, 8]
    assert [(each.start, each.length, each.first) for each in ranges] == [(5, 3, 0), (9, 3, 3)]


def test_equal_images_are_encoded_once_also_at_the_same_time(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        together = await asyncio.gather(*(encoder.encode(b"same", WHERE) for _ in range(5)))
        again = await encoder.encode(b"same", WHERE)
        assert {id(each) for each in (*together, again)} == {id(again)}
        assert encoder.counts.num_encoded == 1 and encoder.counts.num_repeated == 5

    assert with_encoder(work, tmp_path / "log") == ["same"]


def test_the_cache_is_bounded_and_used_files_outlive_it(tmp_path: Path) -> None:
    """Each image has 80 bytes or so, and two of them fit."""

    async def work(encoder: Encoder) -> None:
        first = await encoder.encode(b"first", WHERE)
        path = first.path
        await encoder.encode(b"other", WHERE)
        await encoder.encode(b"third", WHERE)
        assert encoder._num_bytes == 160 and len(encoder._cache) == 2
        assert read_rows(first.placed(0, TOKENS)[1])[0].rows is not None, "a request still holds it"
        del first
        assert not os.path.exists(path) or "wideep-image-rows" not in os.readlink(path)
        await encoder.encode(b"first", WHERE)

    assert with_encoder(work, tmp_path / "log", cache_bytes=160) == ["first", "other", "third", "first"]


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    def opened() -> list[str]:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return [link for link in links if os.path.exists(link) and "wideep-image" in os.readlink(link)]

    async def work(encoder: Encoder) -> None:
        for number in range(4):
            await encoder.encode(b"n%d" % number, WHERE)
        with pytest.raises(ApiError):
            await encoder.encode(b"bad", WHERE)
        assert len(opened()) == 4

    with_encoder(work, tmp_path / "log")
    assert opened() == []


def test_an_unusable_image_is_refused_by_its_part(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        with pytest.raises(ApiError) as caught:
            await encoder.encode(b"bad", WHERE)
        assert caught.value.status == 400 and caught.value.param == WHERE
        assert caught.value.message == f"{WHERE}: the image cannot be used: it is bad."
        await encoder.encode(b"good", WHERE)

    assert with_encoder(work, tmp_path / "log") == ["bad", "good"]


@pytest.mark.parametrize(("word", "status"), [(b"crash", 400), (b"killed", 503)])
def test_a_dead_process_fails_one_image_and_is_replaced(word: bytes, status: int, tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        before = await encoder.encode(b"before", WHERE)
        failing = asyncio.create_task(encoder.encode(word, WHERE))
        after = asyncio.create_task(encoder.encode(b"after", WHERE))
        with pytest.raises(ApiError) as caught:
            await failing
        assert caught.value.status == status and caught.value.param == WHERE
        assert (await after).num_rows == 5
        assert encoder.counts.num_starts == 2
        assert await encoder.encode(b"before", WHERE) is before, "the cache outlives the process"

    assert with_encoder(work, tmp_path / "log") == ["before", word.decode(), "after"]


@pytest.mark.parametrize(
    ("lacks_memory", "is_broken", "status", "starts"), [(False, False, 500, 1), (True, False, 503, 1), (False, True, 500, 2)]
)  # fmt: skip
def test_an_error_of_the_process_fails_one_image_by_its_part(
    lacks_memory: bool, is_broken: bool, status: int, starts: int, tmp_path: Path
) -> None:
    async def work(encoder: Encoder) -> None:
        order = b"failing " + json.dumps(["RuntimeError: why", lacks_memory, is_broken]).encode()
        for _ in range(2):
            with pytest.raises(ApiError) as caught:
                await encoder.encode(order, WHERE)
            assert caught.value.status == status and caught.value.param == WHERE
            assert caught.value.message == f"{WHERE}: the image was not encoded: RuntimeError: why."
            assert bool(caught.value.headers) == lacks_memory
            assert (await encoder.encode(b"good", WHERE)).num_rows == 4
        assert encoder.counts.num_starts == starts, (
            "a broken process ends, and the next image starts another one"
        )

    with_encoder(work, tmp_path / "log")


def test_a_process_that_dies_between_images_costs_nothing(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        await encoder.encode(b"one", WHERE)
        assert encoder._process is not None
        encoder._process.send_signal(signal.SIGKILL)
        await encoder._process.wait()
        await encoder.encode(b"two", WHERE)

    assert with_encoder(work, tmp_path / "log") == ["one", "two"]


def test_an_image_has_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.images.encoder.ENCODE_S", 0.3)

    async def work(encoder: Encoder) -> None:
        with pytest.raises(
            ApiError, match=r"^messages\.0.*url: the image was not encoded within 0\.3 s"
        ) as caught:
            await encoder.encode(b"slow", WHERE)
        assert caught.value.status == 503 and caught.value.param == WHERE and caught.value.headers
        await encoder.encode(b"quick", WHERE)

    assert with_encoder(work, tmp_path / "log") == ["slow", "quick"]


def test_a_client_that_leaves_does_not_fail_another_one(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        leaving = asyncio.create_task(encoder.encode(b"same", WHERE))
        staying = asyncio.create_task(encoder.encode(b"same", WHERE))
        while not encoder._underway:
            await asyncio.sleep(0)
        leaving.cancel()
        assert (await staying).num_rows == 4

    assert with_encoder(work, tmp_path / "log") == ["same"]


def test_an_image_that_no_request_waits_for_is_dropped_before_its_turn(tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        first = asyncio.create_task(encoder.encode(b"held", WHERE))
        while not any(each.has_begun for each in encoder._underway.values()):
            await asyncio.sleep(0)
        leaving = [asyncio.create_task(encoder.encode(b"left", WHERE)) for _ in range(2)]
        while sum(each.num_waiting for each in encoder._underway.values()) < 3:
            await asyncio.sleep(0)
        leaving[0].cancel()
        await asyncio.gather(leaving[0], return_exceptions=True)
        assert len(encoder._underway) == 2, "another request waits for it"
        leaving[1].cancel()
        again = asyncio.create_task(encoder.encode(b"again", WHERE))
        (tmp_path / "released").touch()
        assert [(await each).num_rows for each in (first, again)] == [4, 5]
        assert not encoder._underway and (await encoder.encode(b"left", WHERE)).num_rows == 4

    assert with_encoder(work, tmp_path / "log", cache_bytes=0) == ["held", "again", "left"]


def test_too_many_waiting_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.front.images.encoder.MOST_WAITING", 2)

    async def work(encoder: Encoder) -> None:
        async def send(number: int) -> None:
            async with encoder.room(WHERE):
                await encoder.encode(b"n%d" % number, WHERE)

        found: list[Any] = await asyncio.gather(*map(send, range(5)), return_exceptions=True)
        refused = [each for each in found if isinstance(each, ApiError)]
        assert len(refused) == 3 and all(each.status == 429 and each.headers for each in refused)

    assert len(with_encoder(work, tmp_path / "log")) == 2


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        ("import json; print(json.dumps({'failure': 'no tower'}))", "no tower"),
        ("raise SystemExit(3)", "it ended"),
    ],
)
def test_a_process_that_does_not_start_is_reported(fake: str, reason: str, tmp_path: Path) -> None:
    async def work(encoder: Encoder) -> None:
        with pytest.raises(ApiError, match=f"failed to start: {reason}") as caught:
            await encoder.encode(b"one", WHERE)
        assert caught.value.status == 503

    with_encoder(work, tmp_path / "log", fake=fake)
