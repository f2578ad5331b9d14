"""The served model as clients see it: its names, its limits and its defaults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.api.images import NO_TOWER
from server.api.parsers.registry import Markup
from server.front import errors
from server.front.adapters.registry import KnownAdapters, NamedAdapter
from server.front.images.input import ImageInput
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from server.http.exchanges import owner_of_exchange, seeds_from

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
    adapters: KnownAdapters | None = None  # None: the service has none
    images: ImageInput | None = None  # None: the model takes no images, because
    why_no_images: str = NO_TOWER

    def check_name(self, name: str | None) -> str:
        """Return the model name for the answer. None is the first served name.

        Raises:
            ApiError: 404 if the model is not served here; 503 if it may be an adapter that is not loaded yet.
        """
        if name is None:
            return self.names[0]
        if name not in self.names and self.adapter_of(name) is None:
            if self.adapters is not None and (reason := self.adapters.why_not_ready()) is not None:
                raise errors.not_ready(reason)
            raise errors.not_served(name, self.all_names)
        return name

    @property
    def all_names(self) -> tuple[str, ...]:
        """The model's names, then those of adapters that the running request's API key may use."""
        if self.adapters is None:
            return self.names
        return (*self.names, *self.adapters.names_for(owner_of_exchange()))

    def adapter_of(self, name: str | None) -> NamedAdapter | None:
        """Return the adapter that a request's model name chooses. None if it is the model, or if its API key may not use it.

        The name is the adapter's own, or MODEL:ADAPTER, as in SGLang.
        """
        if name is None or self.adapters is None or name in self.names:
            return None
        base, _, rest = name.partition(":")
        named = self.adapters.find(name) or (self.adapters.find(rest) if base in self.names else None)
        return named if named is not None and named.is_for(owner_of_exchange()) else None

    async def run(self, work: Callable[[], T], *, is_long: bool) -> T:
        """Run short work at once and long work in a thread, a few at a time: each takes memory."""
        if not is_long:
            return work()
        async with self.long_work:
            return await asyncio.to_thread(work)
