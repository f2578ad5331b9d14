"""Where does the time to the first token of an image go, what does a repeated image cost, and do images delay running streams?

A real service with a random Qwen3-VL-MoE of moderate size (or a given model). New images of 448 x 448 and 1,344 x 1,344 pixels are sent
one after the other; /metrics has the times of fetch, decoding, image processor and tower, and the rest of the time to the first
token is the rank's prefill with HTTP. Then each image is sent again. At last, eight streams decode alone, and again while twenty
new images arrive.

Expected bound: the tower takes its operations (2 x parameters x patches, and attention) over the rate of one thread; a repeated
image costs its digest and the last tokens of its prompt, because its prefix is cached; streams lose what the encoder
process takes from the cores with its low priority. Goals: a repeated image at most 0.2 of a new one.

Run: `python -m benchmarks.images [MODEL] [--ranks 1] [--rounds 5] [--save]`. Needs Pillow. The default model takes a few minutes.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
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

SIZES = (448, 1344)  # pixels of a side
PARTS = ("fetch", "decode", "process", "tower")
STREAMS, IMAGES, TOKENS = 8, 20, 200
CHAT = "/v1/chat/completions"


class SizeFigures(NamedTuple):
    """Medians of images of one size, in seconds."""

    pixels: int
    prompt_tokens: int
    new_ttft_s: float
    repeated_ttft_s: float
    repeated_share: float
    parts_s: dict[str, float]  # of a new image, with "prefill and HTTP" as the rest


class StreamFigures(NamedTuple):
    """Times between tokens of running streams, in milliseconds."""

    alone_p50_ms: float
    alone_p99_ms: float
    with_images_p50_ms: float
    with_images_p99_ms: float


def picture(side: int, seed: int) -> str:
    """Return a random picture as a data URL."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (side // 16, side // 16, 3), np.uint8).repeat(16, 0).repeat(16, 1)
    lines = np.concatenate([np.zeros((side, 1), np.uint8), coarse.reshape(side, -1)], axis=1)
    return data_url(png_of(side, side, lines.tobytes()))


def chat(content: Sequence[Mapping[str, Any]], num_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed chat."""
    message = {"role": "user", "content": list(content)}
    return {"messages": [message], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **STREAMED}


def about(url: str, num_tokens: int = 1) -> dict[str, Any]:
    """Return the body of a chat about an image."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is this?"},
    ]
    return chat(parts, num_tokens)


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


async def measure_size(client: StreamClient, url: str, side: int, rounds: int) -> SizeFigures:
    """Send new images and each one again."""
    new, repeated, parts = [], [], []
    for number in range(rounds):
        body = about(picture(side, seed=1000 * side + number))
        before = seconds_of_parts(url)
        first = await ask(client, body)
        after = seconds_of_parts(url)
        again = await ask(client, body)
        assert again.cached_tokens > first.prompt_tokens // 2, "the prefix of a repeated image is cached"
        new.append(ttft_s(first))
        repeated.append(ttft_s(again))
        parts.append({part: after[part] - before[part] for part in PARTS})
    median = {part: statistics.median(each[part] for each in parts) for part in PARTS}
    first_s = statistics.median(new)
    median["prefill and HTTP"] = first_s - sum(median.values())
    again_s = statistics.median(repeated)
    return SizeFigures(side, first.prompt_tokens, first_s, again_s, again_s / first_s, median)


async def stream_gaps(client: StreamClient, images: Sequence[str]) -> list[float]:
    """Run the streams while images arrive. Return the times between their tokens, in milliseconds."""
    text = [{"type": "text", "text": "the cat sat on the mat"}]
    streams = [asyncio.create_task(ask(client, chat(text, TOKENS))) for _ in range(STREAMS)]
    await asyncio.sleep(0.2)  # they decode
    others = [asyncio.create_task(ask(client, about(url))) for url in images]
    answers = await asyncio.gather(*streams)
    await asyncio.gather(*others)
    return [1e3 * (b - a) for answer in answers for a, b in pairwise(answer.arrivals_s)]


async def measure(url: str, rounds: int) -> tuple[list[SizeFigures], StreamFigures]:
    """Run all measurements on a service."""
    client = StreamClient(url)
    try:
        await ask(client, about(picture(SIZES[0], seed=1)))  # starts the encoder
        sizes = [await measure_size(client, url, side, rounds) for side in SIZES]
        await stream_gaps(client, ())
        alone = await stream_gaps(client, ())
        images = [picture(SIZES[0], seed=number) for number in range(100, 100 + IMAGES)]
        loaded = await stream_gaps(client, images)
    finally:
        client.close()
    figures = [percentile(gaps, percent) for gaps in (alone, loaded) for percent in (50, 99)]
    return sizes, StreamFigures(*figures)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "model", nargs="?", help="directory of a model that takes images; default: a random one"
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    card = environment_card()
    print_card(card)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        model = given.model or str(write_random_model(Path(folder) / "model"))
        flags = ["-dp", str(given.ranks), "--max-model-len", "8K"]
        with Service(model, flags, log) as service:
            sizes, streams = asyncio.run(measure(f"http://{HOST}:{service.port}", given.rounds))
    for each in sizes:
        shares = ", ".join(f"{part} {seconds * 1e3:.0f} ms" for part, seconds in each.parts_s.items())
        print(
            f"{each.pixels} x {each.pixels}, {each.prompt_tokens} tokens: {each.new_ttft_s * 1e3:.0f} ms to the first token "
            f"({shares}); again {each.repeated_ttft_s * 1e3:.0f} ms, {each.repeated_share:.2f} of it"
        )
    print(
        f"ITL of {STREAMS} streams: {streams.alone_p50_ms:.1f} ms (p99 {streams.alone_p99_ms:.1f}) alone, "
        f"{streams.with_images_p50_ms:.1f} ms (p99 {streams.with_images_p99_ms:.1f}) while {IMAGES} images arrive"
    )
    result = {
        "benchmark": "images",
        "environment": card,
        "sizes": [each._asdict() for each in sizes],
        "streams": streams._asdict(),
    }
    if given.save:
        save_result("images", result)
    print_tail(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
