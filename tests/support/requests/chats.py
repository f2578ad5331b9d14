"""Prompts of chats, rendered as by the front, with any template."""

import asyncio
from pathlib import Path
from typing import Any

from server.api.parsers.registry import markup_of
from server.api.prompts import render_chat
from server.api.schemas import ChatRequest
from server.api.served import ServedModel
from server.front.structure.structure_checks import StructureChecks
from server.front.tokenizer import Tokenizer
from tests.support.models.tiny_tokenizer import MAX_LEN, write_tokenizer


def rendered(directory: Path, template: str, **fields: Any) -> str:
    """Return the prompt of a chat request. A tiny model is written to `directory`."""
    tokenizer = Tokenizer(str(write_tokenizer(directory, chat_template=template)))
    model = ServedModel(
        names=("m",),
        tokenizer=tokenizer,
        sampling_defaults={},
        max_len=lambda: MAX_LEN,
        created=0,
        structures=StructureChecks(tokenizer.vocabulary),
        markup=markup_of(template),
    )
    return asyncio.run(render_chat(ChatRequest.model_validate(fields), model))
