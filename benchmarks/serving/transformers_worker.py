"""The peer's process: `transformers` continuous batching, driven in a closed loop by commands on standard input.

`python -m benchmarks.serving.transformers_worker MODEL --threads N` reads a JSON object per line and answers with one:
run (a closed loop; timings per token), tokens (greedy ids), static (one `generate` call on a whole batch), configure
(attention, experts and batch size). Requests enter through `ContinuousBatchingManager`, the object behind `generate_batch`:
only it can submit requests while others run and report each token when it arrives. The peer serves no HTTP and shares the
process with its client, which favours it.
"""

import argparse
import asyncio
import dataclasses
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from benchmarks.serving.closed_loop import RequestTiming, closed_loop

NO_EOS = -1
PAGE_TOKENS = 32
SPARE = 1.5  # factor on the pages that all sequences need: the scheduler stops admitting at 20 % free


class Peer:
    """A loaded model of transformers, on any device, and, once configured, its running manager."""

    def __init__(self, model: Any, *, max_num_seqs: int, max_model_len: int) -> None:
        self._model = model
        self._max_num_seqs = max_num_seqs
        self._num_pages = int(SPARE * max_num_seqs * -(-max_model_len // PAGE_TOKENS))
        self._manager: Any = None
        self._numbers = itertools.count()

    def configure(self, attention: str, experts: str, batch_tokens: int) -> None:
        """Stop the previous manager and start one with these implementations."""
        self.close()
        self._model.set_attn_implementation(attention)
        self._model.set_experts_implementation(experts)
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_EOS, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                **page_option(ContinuousBatchingConfig),
                num_blocks=self._num_pages,
                max_batch_tokens=batch_tokens,
                max_requests_per_batch=self._max_num_seqs,
            ),
        )
        self._manager.start()

    def run(self, prompts: list[list[int]], num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Complete prompts in a closed loop."""
        complete = functools.partial(self._complete, num_tokens=num_tokens)
        return asyncio.run(closed_loop(complete, prompts, concurrency))

    def tokens(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the greedy token ids after a prompt."""
        return asyncio.run(self._stream(prompt, num_tokens))[0]

    def static(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        *,
        attention: str = "sdpa",
        cache: str | None = None,
        experts: str | None = None,
    ) -> float:
        """Generate for a whole batch of prompts of one length with `generate`. Return the seconds.

        Args:
            attention: Name of an implementation in transformers.
            cache: Name of a kind of cache in transformers; by default its own choice.
            experts: Name of an implementation in transformers; by default the last one configured.
        """
        self.close()
        self._model.set_attn_implementation(attention)
        if experts is not None:
            self._model.set_experts_implementation(experts)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, pad_token_id=0,
            cache_implementation=cache,
        )  # fmt: skip
        ids = torch.tensor(prompts, device=self._model.device)
        started_s = time.perf_counter()
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds = time.perf_counter() - started_s
        assert output.shape[1] == ids.shape[1] + num_tokens, f"generate stopped early: {output.shape}"
        return seconds

    def close(self) -> None:
        """Stop the manager."""
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10)
            self._manager.destroy()
            self._manager = None

    async def _complete(self, prompt: list[int], num_tokens: int) -> RequestTiming:
        start_s = time.perf_counter()
        ids, arrivals_s = await self._stream(prompt, num_tokens)
        return RequestTiming(start_s, arrivals_s, len(ids))

    async def _stream(self, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
        outputs: asyncio.Queue[Any] = asyncio.Queue()
        request_id = f"request-{next(self._numbers)}"
        self._manager.register_result_handler(request_id, outputs.put_nowait)
        self._manager.add_request(
            prompt,
            request_id=request_id,
            max_new_tokens=num_tokens,
            streaming=True,
            eos_token_id=NO_EOS,
        )
        arrivals_s = []
        while True:
            output = await outputs.get()
            arrivals_s.append(time.perf_counter())
            if output.is_finished():
                break
        if output.error is not None or len(output.generated_tokens) != num_tokens:
            raise RuntimeError(
                f"transformers gave {len(output.generated_tokens)} of {num_tokens} tokens: {output.error}"
            )
        return list(output.generated_tokens), arrivals_s


def page_option(kind: Any) -> dict[str, int]:
    """Return the option for the size of a page, whose name depends on the version: up to 5.17 `block_size`, then `page_size`."""
    known = {field.name for field in dataclasses.fields(kind)}
    return {"page_size" if "page_size" in known else "block_size": PAGE_TOKENS}


def serve(peer: Peer, commands: Iterator[str], answer: Callable[[Any], None]) -> None:
    """Execute commands until the input ends."""
    operations: dict[str, Callable[..., Any]] = {
        "configure": peer.configure,
        "run": peer.run,
        "tokens": peer.tokens,
        "static": peer.static,
    }
    for line in commands:
        command = json.loads(line)
        answer(operations[command.pop("do")](**command))


def main() -> None:
    """Load and serve. Standard output carries only answers; everything else goes to standard error."""
    parser = argparse.ArgumentParser(
        description="transformers continuous batching, driven from standard input."
    )
    parser.add_argument("model", help="model directory")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    model = AutoModelForCausalLM.from_pretrained(
        args.model, trust_remote_code=False, dtype=torch.float32, attn_implementation="sdpa"
    )
    peer = Peer(model, max_num_seqs=args.max_num_seqs, max_model_len=args.max_model_len)
    try:
        answer("ready")
        serve(peer, iter(sys.stdin.readline, ""), answer)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
