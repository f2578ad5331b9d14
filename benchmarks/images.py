"""Where does the time to the first token of an image go, what does a repeated image cost, and do images delay running streams?

A real service with a random Qwen3-VL-MoE of moderate size (or a given model). New images of 448 x 448 and 1,344 x 1,344 pixels are sent
one after the other; /metrics has the times of fetch, decoding, image processor and tower, and the rest of the time to the first
token is the rank's prefill with HTTP. Then each image is sent again, with another question, and by an http URL.

At last, eight streams decode in turn: alone; while twenty new images arrive, as served, and as a control without the policy
SCHED_IDLE of the encoder (`server.front.images.priority`); while these images arrive again, already encoded; and while as many
texts of the same length arrive. The last two come when the first tokens of the new images came. Both differ from the streams
alone by the prefill of the prompts, and new images differ from them by the encoder process.

Expected bound: the tower takes its operations (2 x parameters x patches, and attention) over the rate of one thread; a repeated
image costs its digest and the last tokens of its prompt, because its prefix is cached; streams lose what the encoder
process takes from the cores with its low priority. Goals: a repeated image at most 0.2 of a new one.

Run: `python -m benchmarks.images [MODEL] [--ranks 1] [--rounds 5] [--save]`. Needs Pillow, and root for the control. The default
model takes ten minutes.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.card import environment_card, print_card, print_tail, save_result
from benchmarks.models.seeing import write_random_model
from benchmarks.serving.service import HOST, Service, metric_samples
from server.http.client import ServiceClient
from server.tools.bench.figures import percentile, ttft_s
from server.tools.bench.stream import STREAMED, StreamClient, StreamedAnswer
from tests.support.requests.pictures import data_url, png_of
from tests.support.requests.web_pictures import WebPictures

SIZES = (448, 1344)  # pixels of a side
PARTS = ("fetch", "decode", "process", "tower")
STREAMS, IMAGES, TOKENS = 8, 20, 500
ALONE, NEW, NICE, ENCODED, TEXTS = (
    "alone",
    "new images",
    "new images, encoder with a niceness only",
    "encoded images",
    "texts",
)
CHAT = "/v1/chat/completions"


class SizeFigures(NamedTuple):
    """Medians of images of one size, in seconds."""

    pixels: int
    prompt_tokens: int
    new_ttft_s: float
    repeated_ttft_s: float
    repeated_share: float
    other_question_ttft_s: float
    fetched_ttft_s: float  # the same image and question, by an http URL
    fetch_s: float
    parts_s: dict[str, float]  # of a new image, with "prefill and HTTP" as the rest


class StreamFigures(NamedTuple):
    """Times between tokens of running streams, in milliseconds: medians over rounds of each round's percentile."""

    p50_ms: float
    p99_ms: float
    total_s: float  # until the last stream ended
    last_first_s: float  # until the last first token of the other requests
    num_refused: int  # of the other requests, in all rounds: the encoder took longer than the service waits


class Gaps(NamedTuple):
    """One run of the streams."""

    gaps_ms: list[float]
    total_s: float
    first_s: list[float]  # first tokens of the other requests, counted from the first of these requests
    num_refused: int


def picture(side: int, seed: int) -> str:
    """Return a random picture as a data URL."""
    return data_url(picture_file(side, seed))


def picture_file(side: int, seed: int) -> bytes:
    """Return a random picture as a PNG."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (side // 16, side // 16, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    lines = np.concatenate([np.zeros((side, 1), np.uint8), coarse.reshape(side, -1)], axis=1)
    return png_of(side, side, lines.tobytes())


def chat(content: Sequence[Mapping[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed chat."""
    message = {"role": "user", "content": list(content)}
    return {"messages": [message], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **STREAMED}


def about(url: str, *, before: str = "", question: str = "What is this?") -> dict[str, Any]:
    """Return the body of a chat about an image, with one token as the answer."""
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": before},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]
    return chat(parts if before else parts[1:], 1)


def seconds_of_parts(url: str) -> dict[str, float]:
    """Return the seconds that all images took so far, by part."""
    with ServiceClient(url) as client:
        return {
            sample.labels["part"]: sample.value
            for sample in metric_samples(client)
            if sample.name == "wideep:image_seconds_total"
        }


async def ask(client: StreamClient, body: Mapping[str, Any]) -> StreamedAnswer:
    """Run a request; fail if it fails."""
    answer = await client.ask(CHAT, body)
    assert not answer.failure, answer.failure
    return answer


async def measure_size(
    client: StreamClient, url: str, side: int, rounds: int, web: WebPictures
) -> SizeFigures:
    """Send new images and each one again, with another question, and by an http URL."""
    new, repeated, other, fetched, fetches, parts = [], [], [], [], [], []
    for number in range(rounds):
        file = picture_file(side, seed=1000 * side + number)
        body = about(image := data_url(file))
        before = seconds_of_parts(url)
        first = await ask(client, body)
        after = seconds_of_parts(url)
        again = await ask(client, body)
        assert again.cached_tokens > first.prompt_tokens // 2, "the prefix of a repeated image is cached"
        other.append(ttft_s(await ask(client, about(image, question="Where is the cat on the mat?"))))
        fetched_before = seconds_of_parts(url)["fetch"]
        fetched.append(ttft_s(await ask(client, about(web.url_of(file)))))
        fetches.append(seconds_of_parts(url)["fetch"] - fetched_before)
        new.append(ttft_s(first))
        repeated.append(ttft_s(again))
        parts.append({part: after[part] - before[part] for part in PARTS})
    median = {part: statistics.median(each[part] for each in parts) for part in PARTS}
    first_s = statistics.median(new)
    median["prefill and HTTP"] = first_s - sum(median.values())
    again_s = statistics.median(repeated)
    other_s, fetched_s, fetch_s = (statistics.median(each) for each in (other, fetched, fetches))
    return SizeFigures(
        side, first.prompt_tokens, first_s, again_s, again_s / first_s, other_s, fetched_s, fetch_s, median
    )


async def stream_gaps(
    client: StreamClient, bodies: Sequence[Mapping[str, Any]], delays_s: Sequence[float] = ()
) -> Gaps:
    """Run the streams while other requests arrive: all at once, or after these delays."""
    text = [{"type": "text", "text": "the cat sat on the mat"}]
    streams = [asyncio.create_task(ask(client, chat(text, TOKENS))) for _ in range(STREAMS)]
    await asyncio.sleep(0.2)  # they decode

    async def later(body: Mapping[str, Any], delay_s: float) -> StreamedAnswer:
        await asyncio.sleep(delay_s)
        return await client.ask(CHAT, body)

    pairs = zip(bodies, delays_s or [0.0] * len(bodies), strict=False)
    others = [asyncio.create_task(later(*pair)) for pair in pairs]
    answers = await asyncio.gather(*streams)
    found = await asyncio.gather(*others)
    begun_s = min((each.start_s for each in found), default=0.0)
    return Gaps(
        [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.arrivals_s)],
        max(each.end_s for each in answers) - min(each.start_s for each in answers),
        sorted(each.first_s - begun_s for each in found if not each.failure),
        sum(bool(each.failure) for each in found),
    )


@contextlib.contextmanager
def niceness_only(service: Service) -> Iterator[None]:
    """Take the policy SCHED_IDLE from the threads of the encoder process, for a while."""
    [pid] = [pid for pid in service.pids() if b"image-encoder" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    policies = {thread: os.sched_getscheduler(thread) for thread in map(int, os.listdir(f"/proc/{pid}/task"))}
    try:
        for thread in policies:
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        yield
    finally:
        for thread, policy in policies.items():
            os.sched_setscheduler(thread, policy, os.sched_param(0))


async def texts_of(client: StreamClient, num_tokens: int, number: int) -> list[dict[str, Any]]:
    """Return chats with this number of prompt tokens and no common prefix."""

    def text(at: int, words: int) -> dict[str, Any]:
        return chat([{"type": "text", "text": f"{number:03}.{at:03}{' mat' * words}"}], 1)

    few, many = [(await ask(client, text(999, words))).prompt_tokens for words in (10, 110)]
    words = 10 + round((num_tokens - few) * 100 / (many - few))
    return [text(at, words) for at in range(IMAGES)]


async def measure_streams(
    client: StreamClient, service: Service, rounds: int
) -> tuple[dict[str, StreamFigures], int]:
    """Run the streams next to everything, in turn. Return the figures, and the tokens of each prompt."""
    found: dict[str, list[Gaps]] = {name: [] for name in (ALONE, NEW, NICE, ENCODED, TEXTS)}
    await stream_gaps(client, ())
    num_tokens = 0
    for number in range(rounds):
        found[ALONE].append(await stream_gaps(client, ()))
        for name in (NEW, NICE) if number % 2 else (NICE, NEW):
            first_seed = 1000 * number + (500 if name == NICE else 0)
            images = [picture(SIZES[0], seed) for seed in range(first_seed, first_seed + IMAGES)]
            bodies = [about(image, before=f"{number:03}.{at:03}") for at, image in enumerate(images)]
            with niceness_only(service) if name == NICE else contextlib.nullcontext():
                found[name].append(await stream_gaps(client, bodies))
        # The last images again, after other texts, so that no prefix of them is cached.
        again = [about(image, before=f"{number:03}:{at:03}") for at, image in enumerate(images)]
        num_tokens = (await ask(client, about(images[0], before=f"{number:03}?999"))).prompt_tokens
        arrivals_s = found[NEW][-1].first_s
        found[ENCODED].append(await stream_gaps(client, again, arrivals_s))
        texts = await texts_of(client, num_tokens, number)
        found[TEXTS].append(await stream_gaps(client, texts, arrivals_s))
    figures = {}
    for name, runs in found.items():
        p50, p99 = (
            statistics.median(percentile(run.gaps_ms, percent) for run in runs) for percent in (50, 99)
        )
        total_s = statistics.median(run.total_s for run in runs)
        last_s = statistics.median(max(run.first_s, default=0.0) for run in runs)
        num_refused = sum(run.num_refused for run in runs)
        figures[name] = StreamFigures(p50, p99, total_s, last_s, num_refused)
    return figures, num_tokens


async def measure(
    service: Service, rounds: int, sizes: Sequence[int]
) -> tuple[list[SizeFigures], dict[str, StreamFigures], int]:
    """Run all measurements on a service."""
    url = f"http://{HOST}:{service.port}"
    client = StreamClient(url)
    try:
        await ask(client, about(picture(SIZES[0], seed=1)))  # starts the encoder
        with WebPictures(HOST) as web:
            figures = [await measure_size(client, url, side, rounds, web) for side in sizes]
        return figures, *await measure_streams(client, service, rounds)
    finally:
        client.close()


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="directory of a model that takes images; default: a random one"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="pixels of a side")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    card = environment_card()
    print_card(card)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        model = given.model or str(write_random_model(Path(folder) / "model"))
        flags = ["-dp", str(given.ranks), "--max-model-len", "8K", "--allowed-media-domains", HOST]
        with Service(model, flags, log) as service:
            sizes, streams, num_tokens = asyncio.run(measure(service, given.rounds, given.sizes))
    for each in sizes:
        shares = ", ".join(f"{part} {seconds * 1e3:.0f} ms" for part, seconds in each.parts_s.items())
        print(
            f"{each.pixels} x {each.pixels}, {each.prompt_tokens} tokens: {each.new_ttft_s * 1e3:.0f} ms to the first token "
            f"({shares}); again {each.repeated_ttft_s * 1e3:.0f} ms, {each.repeated_share:.2f} of it; another question "
            f"{each.other_question_ttft_s * 1e3:.0f} ms; by http {each.fetched_ttft_s * 1e3:.0f} ms, {each.fetch_s * 1e3:.1f} of "
            f"these for the fetch"
        )
    print(f"Times between tokens of {STREAMS} streams next to {IMAGES} prompts of {num_tokens} tokens:")
    for name, figures in streams.items():
        print(
            f"  {name}: p50 {figures.p50_ms:.1f} ms, p99 {figures.p99_ms:.1f} ms; all streams {figures.total_s:.1f} s; last first "
            f"token after {figures.last_first_s:.1f} s; {figures.num_refused} refused"
        )
    result = {
        "benchmark": "images",
        "environment": card,
        "sizes": [each._asdict() for each in sizes],
        "rounds": given.rounds,
        "prompt_tokens": num_tokens,
        "streams": {name: figures._asdict() for name, figures in streams.items()},
    }
    if given.save:
        save_result("images", result)
    print_tail(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
