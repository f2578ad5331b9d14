"""The served model as clients see it: its names, its limits and its defaults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server import errors
from server.api.parsers.registry import Markup
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.exchanges import seeds_from

T = TypeVar("T")
MAX_LONG_WORK = 2  # long texts that are rendered or tokenized at once, each in a thread


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What requests are checked against."""

    names: tuple[str, ...]  # the first is what metrics say
    tokenizer: Tokenizer
    sampling_defaults: dict[str, Any]  # from the checkpoint's generation_config.json
    max_len: Callable[[], int]  # tokens, prompt plus output; known for certain once ranks have attached
    created: int  # seconds since 1970
    structures: StructureChecks
    directory: str = ""  # of the checkpoint
    draw_seed: Callable[[], int] = seeds_from(None)  # noqa: RUF009 - a function; for requests that bring none
    max_logprobs: int | None = (
        None  # beside each token, ALL is no bound; None is the usual bound, or all of them
    )
    has_priorities: bool = False  # requests may have one
    has_metrics: bool = False  # answers tell how long they took
    long_work: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_LONG_WORK)
    )  # see `run`
    markup: Markup = Markup()  # noqa: RUF009 - frozen; how the model writes calls and reasoning

    def check_name(self, name: str | None) -> str:
        """Return the name that answers carry; None is the first served name.

        Raises:
            ApiError: 404, the model is not served here.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise errors.not_served(name, self.names)
        return name

    async def run(self, work: Callable[[], T], *, is_long: bool) -> T:
        """Do what is short at once, and the rest beside the event loop, a few at a time: each takes memory."""
        if not is_long:
            return work()
        async with self.long_work:
            return await asyncio.to_thread(work)
