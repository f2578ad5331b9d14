"""The benchmark's side of the peer: starts `transformers_worker` and finds the fastest of its settings."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from benchmarks.serving.closed_loop import RequestTiming, summarise
from server.machine.parent_death import die_with_parent

STOP_TIMEOUT_S = 20.0


class PeerError(RuntimeError):
    """The peer's process ended; the message quotes its last output."""


class PeerSetting(NamedTuple):
    """Settings of transformers, by its own names."""

    attention: str
    experts: str
    batch_tokens: int  # largest number of tokens per step

    def __str__(self) -> str:
        return f"{self.attention}/{self.experts}/{self.batch_tokens}"


class TransformersPeer:
    """A running peer, as a context that stops it."""

    def __init__(
        self, directory: Path, *, threads: int, max_num_seqs: int, max_model_len: int, log: IO[bytes]
    ) -> None:
        """Start the peer and wait until the model is loaded.

        Raises:
            PeerError: The process ended.
        """
        self._log = log
        started_s = time.monotonic()
        limits = [
            f"--threads={threads}",
            f"--max-num-seqs={max_num_seqs}",
            f"--max-model-len={max_model_len}",
        ]
        # Set the environment too: torch.set_num_threads only affects the calling thread, and the manager has its own.
        counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.transformers_worker", str(directory), *limits],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **counts},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            preexec_fn=functools.partial(die_with_parent, parent_pid=os.getpid()),
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process by closing its input."""
        assert self.process.stdin is not None, "started with a pipe"
        self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def configure(self, setting: PeerSetting) -> None:
        """Use these settings from now on."""
        self._do("configure", **setting._asdict())

    def run(self, prompts: Sequence[list[int]], num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Complete prompts in a closed loop."""
        timings = self._do("run", prompts=prompts, num_tokens=num_tokens, concurrency=concurrency)
        return [RequestTiming(*timing) for timing in timings]

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy token ids after a prompt."""
        return list(self._do("tokens", prompt=prompt, num_tokens=num_tokens))

    def static(self, prompts: Sequence[list[int]], num_tokens: int) -> float:
        """Return the output tokens per second of one `generate` call. Call `configure` next."""
        return len(prompts) * num_tokens / float(self._do("static", prompts=prompts, num_tokens=num_tokens))

    def _do(self, operation: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None, "started with a pipe"
        try:
            self.process.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended: reading reports the reason
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None, "started with a pipe"
        line = self.process.stdout.readline()
        if not line:
            self._log.flush()
            words = Path(self._log.name).read_text(errors="replace")[-2000:]
            raise PeerError(f"the transformers process ended. Its log:\n{words}")
        return json.loads(line)


def fastest(
    peer: TransformersPeer,
    settings: Sequence[PeerSetting],
    prompts: Sequence[Sequence[list[int]]],
    num_tokens: int,
    concurrency: int,
) -> tuple[PeerSetting, dict[str, float]]:
    """Try settings, with one lot of prompts for each. Configure the peer with the fastest; return it and all rates.

    One prompt is run first, so that the first setting does not pay for cold caches.
    """
    rates: dict[PeerSetting, float] = {}
    peer.configure(settings[0])
    peer.run(prompts[0][:1], num_tokens, 1)
    for setting, lot in zip(settings, prompts, strict=True):
        peer.configure(setting)
        rates[setting] = summarise(peer.run(lot, num_tokens, concurrency)).tokens_per_s
    best = max(settings, key=rates.__getitem__)
    peer.configure(best)
    return best, {str(setting): rate for setting, rate in rates.items()}
