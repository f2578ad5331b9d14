"""The `usage` object: what a request cost in tokens."""

from collections.abc import Collection, Iterable
from typing import Any

from server.front.generations import Generation


def usage_of(
    generations: Iterable[Generation], n: int, *, told: Collection[int] | None = None
) -> dict[str, Any]:
    """Count a request's tokens.

    Args:
        generations: every choice, n in a row per prompt; a prompt is counted once, however many choices it has.
        n: choices per prompt.
        told: the choices whose output counts, by index; None is all.
    """
    choices = list(generations)
    prompt_tokens = sum(len(choice.ask.request.prompt_ids) for choice in choices[::n])
    output_tokens = sum(choice.num_tokens for choice in choices if told is None or choice.index in told)
    # Of a prompt's n choices only the first can find nothing cached: its count is the prompt's.
    cached_tokens = sum(choice.num_cached_tokens for choice in choices[::n])
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
