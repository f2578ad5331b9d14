"""Answers without ranks: exchanges, generations and their outputs, built by hand."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from scheduler.policy.request import FinishReason, Request, RequestOutput, SamplingParams
from server.front.errors import ApiError
from server.front.generations import Answer, Ask
from server.http.exchanges import HttpExchange


class ByteDecoder:
    """Decodes token i as byte i."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode(errors="replace")

    def lone_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str | None] | None:
        return None


def ask_of(
    request_id: str = "r", prompt_ids: Sequence[int] = (65,), *, stops: tuple[str, ...] = (), **params: Any
) -> Ask:
    """Return a request to a rank, with nine tokens unless `params` override that."""
    sampling = SamplingParams(**{"max_tokens": 9, **params})
    request = Request(request_id=request_id, prompt_ids=tuple(prompt_ids), params=sampling, arrival_s=100.0)
    return Ask(request=request, stops=stops)


def ended_answer(
    prompt: str, *texts: str, failure: ApiError | None = None, queued_s: float = 0.0, **params: Any
) -> Answer:
    """Return an answer with ended choices, each 2 s after a first token that came 1 s after arrival."""
    answer = Answer("chatcmpl-1", lambda _answer: None)
    for number, text in enumerate(texts):
        name = f"chatcmpl-1-{number}"
        generation = answer.add(ask_of(name, prompt.encode(), **params), 1, ByteDecoder())
        generation.push(RequestOutput(request_id=name, token_ids=list(text.encode()), queued_s=queued_s))
        if text:
            generation.first_token_s, generation.last_token_s = 101.0, 103.0
        generation.end(FinishReason.ERROR if failure else FinishReason.STOP, failure)
    return answer


def ended_exchange(*answers: Answer, **how: Any) -> HttpExchange:
    """Return an exchange that took 3.5 s."""
    known = {
        "request_id": "req-1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "client": "127.0.0.1:5000",
        "headers": {},
        "begun_s": 0.0,
        "begun_ns": time.time_ns(),
        "handler": "/v1/chat/completions",
        "status": 200,
        "duration_s": 3.5,
        "answers": list(answers),
    }
    return HttpExchange(**{**known, **how})
