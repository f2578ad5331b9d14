"""How `LLM` sends prompts to its service: one request per prompt, many at once.

A prompt goes to /v1/completions and returns with its token ids (`return_token_ids`, as in vLLM). A chat is first converted
to token ids by /tokenize, which renders the template in the same way as the chat endpoint. Its images follow with the
token ids.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from server.api.images import FIELD
from server.api.media import IMAGE_PARTS
from server.api.openai.batches.bulk_client import BulkClient, for_each
from server.clients.llm.results import RequestOutput, SamplingParams, output_from
from server.clients.progress import RequestProgress


class LLMError(ValueError):
    """The service refused a prompt or parameter; the message names it, and `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class Question(NamedTuple):
    """A prompt and its sampling parameters."""

    place: int  # index among all prompts
    prompt: str | list[int] | dict[str, Any]  # text, token ids, or a chat in the form of /tokenize
    params: SamplingParams


async def complete_all(
    questions: Sequence[Question], client: BulkClient, *, shows_bar: bool
) -> list[RequestOutput]:
    """Complete all prompts; results are in the order of the prompts.

    Raises:
        LLMError: The service refused a prompt; the others are cancelled.
        ServiceLostError: The service cannot be reached any more.
    """
    results: dict[int, RequestOutput] = {}

    async def complete(question: Question) -> None:
        results[question.place] = await _complete(question, client, max_model_len)
        if progress is not None:
            progress.step()

    async with client:
        max_model_len = (await client.get("/v1/models")).body["data"][0]["max_model_len"]
        with RequestProgress(len(questions), "wideep") if shows_bar else contextlib.nullcontext() as progress:
            await for_each(questions, complete, concurrency=client.concurrency)
    return [results[place] for place in range(len(questions))]


async def _complete(question: Question, client: BulkClient, max_model_len: int) -> RequestOutput:
    prompt, params = question.prompt, question.params
    text = prompt if isinstance(prompt, str) else None
    images: list[Any] = []
    if isinstance(prompt, dict):
        images = _images_of(prompt["messages"])
        prompt = await _tokenize(client, prompt, question.place)
        text = (await _ask(client, "/detokenize", {"tokens": prompt}, question.place))["prompt"]
    body = params.body() | {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if params.max_tokens is None:  # the endpoint's own default is OpenAI's 16
        if isinstance(prompt, str):
            prompt = await _tokenize(client, {"prompt": prompt}, question.place)
        body["max_tokens"] = max(1, max_model_len - len(prompt))  # the service refuses a longer prompt
    if images:
        body["images"] = images
    answer = await _ask(client, "/v1/completions", {**body, "prompt": prompt}, question.place)
    return output_from(answer, text, params)


def _images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the image parts of a chat in order. Each has its place in the chat, for errors."""
    return [
        {**part, FIELD: f"messages.{place}.content.{number}"}
        for place, message in enumerate(messages)
        if isinstance(content := message.get("content"), list)
        for number, part in enumerate(content)
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
    ]


async def _tokenize(client: BulkClient, asked: Mapping[str, Any], place: int) -> list[int]:
    token_ids: list[int] = (await _ask(client, "/tokenize", asked, place))["tokens"]
    return token_ids


async def _ask(client: BulkClient, path: str, body: Mapping[str, Any], place: int) -> Any:
    reply = await client.post(path, body)
    if not reply.is_good:
        raise LLMError(f"prompt {place}: {reply.complaint}", reply.status)
    return reply.body
