"""The served model as clients see it: its names, its limits and its defaults."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server import errors
from server.api.parsers.registry import Markup
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer

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
    long_work: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MAX_LONG_WORK)
    )  # see `prompts.run`
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
