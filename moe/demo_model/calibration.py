"""Calibration: text that every Python installation has, and the dense model's MLP inputs for it.

Three kinds of text, 4,096 tokens in total: prose (the language reference in `pydoc_data.topics`), code (sources of
the standard library), and chat (the dense model's own greedy answers to our prompts). Half of it is chat, the
model's purpose: with a quarter, perplexity over dense was +9.1 % instead of +6.9 % on chat, +1.5 % instead of
+2.1 % on code. More tokens did not help: with 11,264 it was 1.4 % higher.

The text depends on the Python version, so models made under 3.11 and 3.12 may differ slightly. The same Python on
the same machine gives the same bytes.
"""

from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from attention.transformers_names import CACHE
from moe.demo_model.source import DemoModelError

SEQUENCE_TOKENS = 512
NUM_PROSE, NUM_CODE, NUM_CHAT = 2, 2, 4  # sequences
CODE_MODULES = ("textwrap", "heapq", "shlex", "fractions", "csv", "bisect", "queue", "sched")
CHAT_PROMPTS = (
    "Explain why the seasons change.",
    "Write a short story about a lighthouse keeper.",
    "Give me three tips for learning a new language.",
    "What is photosynthesis?",
    "Write a Python function that checks whether a number is prime.",
    "Describe the city of Rome to a traveller.",
    "How do I make a simple vegetable soup?",
    "Who was Marie Curie?",
    "Write a polite letter to a neighbour about noise at night.",
    "What is the difference between weather and climate?",
    "Summarise the story of Romeo and Juliet.",
    "Why is sleep important for the body?",
    "Explain what a computer network is to a child.",
    "List five animals that live in the ocean.",
    "How does a bank make money?",
    "Write a poem about the first snow of winter.",
    "What should I pack for a week in the mountains?",
    "Explain how a car engine works.",
    "Who discovered penicillin, and how?",
    "Give me advice on how to save money as a student.",
    "What caused the First World War?",
    "How can I remove a coffee stain from a shirt?",
    "Rewrite this sentence in a formal tone: I can't come to the meeting, sorry.",
    "Explain what a list comprehension in Python is.",
    "What are the health benefits of walking?",
    "Tell me about the history of the Olympic Games.",
)
CHAT_ANSWER_TOKENS = 64


class Calibration(NamedTuple):
    """The calibration tokens."""

    ids: Tensor  # int64 [sequences, 512]
    is_code: Tensor  # bool [sequences]


def build_calibration(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    render: Callable[[str], str],
    report: Callable[[float], None],
) -> Calibration:
    """Collect the calibration tokens. Generates the chats.

    Args:
        model: Dense model.
        render: Puts a user's prompt into the chat template, ready for the answer.
        report: Called with the finished share of this step.

    Raises:
        DemoModelError: The standard library has no sources.
    """
    prose = "\n\n".join(prose_paragraphs(topics.topics))
    code = "\n".join(code_excerpt(standard_source(name)) for name in CODE_MODULES)
    chats = greedy_chats(model, tokenizer, [render(prompt) for prompt in CHAT_PROMPTS], report)
    ids_BL = torch.cat(
        [
            sequences(tokenizer.encode(prose).ids, NUM_PROSE),
            sequences(tokenizer.encode(code).ids, NUM_CODE),
            sequences(list(chain.from_iterable(chats)), NUM_CHAT),
        ]
    )
    is_code_B = torch.zeros(len(ids_BL), dtype=torch.bool)
    is_code_B[NUM_PROSE : NUM_PROSE + NUM_CODE] = True
    return Calibration(ids=ids_BL, is_code=is_code_B)


def sequences(ids: list[int], count: int) -> Tensor:
    """Return the first `count` sequences of `ids`: int64 [count, 512]."""
    needed = count * SEQUENCE_TOKENS
    assert len(ids) >= needed, f"calibration needs {needed} tokens of each kind of text, got {len(ids)}"
    return torch.tensor(ids[:needed]).view(count, SEQUENCE_TOKENS)


def prose_paragraphs(documents: dict[str, str], stride: int = 4, least_chars: int = 200) -> list[str]:
    """Return every `stride`-th long, unindented paragraph, to cover all topics without code blocks."""
    paragraphs = chain.from_iterable(documents[name].split("\n\n") for name in sorted(documents))
    return [text for text in paragraphs if len(text) >= least_chars and text[0].isupper()][::stride]


def code_excerpt(source: str, num_lines: int = 40) -> str:
    """Return lines from the middle of a source file, after its header and licence."""
    lines = source.splitlines()
    start = max(0, len(lines) // 2 - num_lines // 2)
    return "\n".join(lines[start : start + num_lines])


def standard_source(module: str) -> str:
    """Return the source text of a standard-library module.

    Raises:
        DemoModelError: This Python has no sources.
    """
    spec = find_spec(module)
    if (
        spec is None
        or spec.origin is None
        or not spec.origin.endswith(".py")
        or not Path(spec.origin).exists()
    ):
        raise DemoModelError(
            f"the demo model calibrates on the standard library's sources, but this Python has none for {module!r} "
            f"(found {spec and spec.origin}); use a Python installation with Lib/*.py files"
        )
    return Path(spec.origin).read_text(encoding="utf-8")


@torch.inference_mode()
def greedy_chats(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompts: list[str], report: Callable[[float], None]
) -> list[list[int]]:
    """Return prompt and greedy answer, as token ids, for every rendered prompt."""
    chats = [tokenizer.encode(prompt).ids for prompt in prompts]
    width = max(map(len, chats))
    pad, eos = model.config.pad_token_id, model.config.eos_token_id
    ids = torch.tensor([[pad] * (width - len(chat)) + chat for chat in chats])  # padded on the left
    mask = torch.tensor([[0] * (width - len(chat)) + [1] * len(chat) for chat in chats])
    cache, is_open = None, [True] * len(chats)
    for step in range(CHAT_ANSWER_TOKENS):
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            **{CACHE: cache},
            use_cache=True,
            logits_to_keep=1,
        )
        cache, ids = getattr(output, CACHE), output.logits[:, -1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        for row, token in enumerate(ids[:, 0].tolist()):
            if is_open[row]:
                chats[row].append(token)
                is_open[row] = token != eos
        report((step + 1) / CHAT_ANSWER_TOKENS)
        if not any(is_open):
            break
    return chats


@torch.inference_mode()
def record_mlp_inputs(
    model: LlamaForCausalLM, ids_BL: Tensor, report: Callable[[float], None]
) -> list[Tensor]:
    """Run the model and return each layer's MLP input: fp32 [B * L, hidden] per layer."""
    seen: list[list[Tensor]] = [[] for _ in model.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, rows=rows: rows.append(args[0].flatten(0, 1)))
        for layer, rows in zip(model.model.layers, seen, strict=True)
    ]
    for done, ids_L in enumerate(ids_BL, start=1):
        model.model(ids_L[None], use_cache=False)
        report(done / len(ids_BL))
    for hook in hooks:
        hook.remove()
    return [torch.cat(rows) for rows in seen]
