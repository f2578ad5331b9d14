"""The served model as clients see it: its names, its limits and its defaults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.api.parsers.registry import Markup
from server.front import errors
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.exchanges import seeds_from

T = TypeVar("T")
MAX_LONG_WORK = 2  # threads that render or tokenize long texts, or build long answers


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The facts that requests are checked against."""

    names: tuple[str, ...]  # metrics show the first one
    tokenizer: Tokenizer
    sampling_defaults: dict[str, Any]  # from the checkpoint's generation_config.json
    max_len: Callable[[], int]  # tokens, prompt plus output; final once ranks have attached
    created: int  # seconds since 1970
    structures: StructureChecks
    directory: str = ""  # of the checkpoint
    draw_seed: Callable[[], int] = seeds_from(None)  # noqa: RUF009 - a function; for requests without a seed
    # Maximum per token; ALL disables the limit. With None, clients may request up to MAX_LOGPROBS, or ALL.
    max_logprobs: int | None = None
    has_priorities: bool = False  # requests may set a priority
    has_metrics: bool = False  # answers include their durations
    # Limits the concurrent work in `run`.
    long_work: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LONG_WORK))
    markup: Markup = Markup()  # noqa: RUF009 - frozen; the model's format for calls and reasoning

    def check_name(self, name: str | None) -> str:
        """Return the model name for the answer. None is the first served name.

        Raises:
            ApiError: 404 if the model is not served here.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise errors.not_served(name, self.names)
        return name

    async def run(self, work: Callable[[], T], *, is_long: bool) -> T:
        """Run short work at once and long work in a thread, a few at a time: each takes memory."""
        if not is_long:
            return work()
        async with self.long_work:
            return await asyncio.to_thread(work)
