"""How much quality do rows in FP8 cost? KL divergence and perplexity against rows that are not quantised, in plain torch.

The weights of experts and linear layers are rounded to FP8 with scales for blocks of 128 x 128. Every prompt runs through the
unquantised model, through the one with rounded weights, and through the latter with rows rounded to e4m3 per token and
128 inputs, as GPUs do (`moe.gpu.products.fp8`). Everything else is in float32, so only the rounding differs. Perplexity is that of the
prompts' own tokens. A model compared with itself has a KL divergence of 0 and an agreement of 1.

Run: `python -m benchmarks.weights.fp8_rows PROMPTS.jsonl ... [--model demo|DIRECTORY] [--prompts 100] [--tokens 256] [--save]`.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.card import print_tail, save_result
from benchmarks.weights.quantisation import deviation, read_sample

BLOCK, LARGEST = 128, 448.0
KEPT = ("lm_head", "gate", "embed_tokens", "router")  # modules that FP8 checkpoints keep in bfloat16


def rounded(x: Tensor, *, rows: int) -> Tensor:
    """Round [N, K] to e4m3 with a scale for `rows` rows and 128 inputs, new."""
    N, K = x.shape
    padded = torch.nn.functional.pad(x, (0, -K % BLOCK, 0, -N % rows))
    blocks = padded.view(padded.shape[0] // rows, rows, -1, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=2.0**-100) / LARGEST
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).view(padded.shape)[:N, :K]


def round_weights(net: PreTrainedModel) -> set[int]:
    """Round the weights in place. Return the memory of those that are kept."""
    kept = set()
    for name, weight in net.named_parameters():
        module = name.removesuffix(".weight").rpartition(".")[2]
        if weight.dim() < 2 or module in KEPT:
            kept.add(weight.untyped_storage().data_ptr())
            continue
        for each in weight.data if weight.dim() == 3 else [weight.data]:
            each.copy_(rounded(each, rows=BLOCK))
    return kept


@contextmanager
def rounding_rows(kept: set[int]) -> Iterator[None]:
    """Round the rows of every product with a weight that is not kept."""
    plain = torch.nn.functional.linear

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight.untyped_storage().data_ptr() not in kept:
            input = rounded(input.reshape(-1, input.shape[-1]), rows=1).view(input.shape)
        return plain(input, weight, bias)

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = plain


def run(net: PreTrainedModel, sequences: list[list[int]], taken: list[Tensor]) -> Iterator[Tensor]:
    """Yield log probabilities [tokens, V] of each sequence. Append those of its own tokens to `taken`."""
    for ids in sequences:
        with torch.inference_mode():
            found: Tensor = net(torch.tensor([ids])).logits[0].log_softmax(-1)
        taken.append(found[:-1].gather(1, torch.tensor(ids[1:])[:, None]))
        yield found


def load(directory: Path) -> PreTrainedModel:
    """Load a model in float32. Its experts are computed with `torch.nn.functional.linear`."""
    net: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, trust_remote_code=False
    ).eval()
    net.set_experts_implementation("eager")
    return net


def measure(directory: Path, sequences: list[list[int]]) -> dict[str, dict[str, float]]:
    """Return the figures of each form."""
    exact, net = load(directory), load(directory)
    kept = round_weights(net) | {weight.untyped_storage().data_ptr() for weight in exact.parameters()}
    found = {}
    for form, rows in (("weights", nullcontext()), ("weights and rows", rounding_rows(kept))):
        wanted: list[Tensor] = []
        taken: list[Tensor] = []
        with rows:
            figures = deviation(run(exact, sequences, wanted), run(net, sequences, taken))
        figures |= {"perplexity": perplexity(taken), "perplexity_unquantised": perplexity(wanted)}
        print(
            f"{form} in FP8: " + ", ".join(f"{name} {value:.5g}" for name, value in figures.items()),
            flush=True,
        )
        found[form] = figures
    return found


def perplexity(taken: list[Tensor]) -> float:
    """Return the perplexity of tokens with these log probabilities."""
    return float((-torch.cat(taken).mean()).exp())


def main(arguments: list[str] | None = None) -> int:
    """Print a line per form and one JSON line; return the exit status."""
    directory, sequences, options, card = read_sample(
        "fp8_rows", __doc__.split("\n")[0], arguments, least_tokens=2
    )
    results: dict[str, Any] = {
        "environment": card, "model": options.model, "files": [file.name for file in options.files],
        "prompts": len(sequences), "tokens": options.tokens, **measure(directory, sequences),
    }  # fmt: skip
    if options.save:
        print(f"saved {save_result('fp8_rows', results).name}")
    print_tail(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
