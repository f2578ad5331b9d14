"""A valid body or more for every POST endpoint, to be mutated. A new endpoint brings its own: a test insists."""

from typing import Any

from tests.support.paced_front import MODEL

_CHAT = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "the cat sat"},
        {"role": "user", "content": [{"type": "text", "text": "hello world"}], "name": "me"},
        {"role": "assistant", "content": "on the mat"},
        {"role": "user", "content": "hello"},
    ],
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "stop": ["zebra"],
    "seed": 1,
}
_COMPLETION = {"model": MODEL, "prompt": "the cat sat on the mat", "max_tokens": 4, "n": 2, "seed": 3}

BODIES: dict[str, tuple[Any, ...]] = {
    "/v1/chat/completions": (
        _CHAT,
        {**_CHAT, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {
            **_CHAT,
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "presence_penalty": 0.5,
            "max_completion_tokens": 3,
        },
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"a": 1}, "user": "u"},
    ),
    "/v1/completions": (
        _COMPLETION,
        {**_COMPLETION, "prompt": ["hello", "world"], "stream": True, "logprobs": 2},
        {**_COMPLETION, "prompt": [[5, 6, 7], [8]], "echo": True, "stop_token_ids": [9], "min_tokens": 1},
        {"prompt": [5, 6, 7], "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True},
    ),
    "/experts/plan": ({"policy": "shares", "max_moved": 0.5}, {}),
    "/experts/apply": ({"policy": "repair", "max_moved": 0.1},),
    "/experts/rollback": ({},),
    "/start_expert_distribution_record": ({},),
    "/stop_expert_distribution_record": ({},),
    "/dump_expert_distribution_record": ({},),
    "/ping": ({},),
}
RARE = (  # endpoints that take no body, or start a process: a few mutations each say all there is to say
    "/experts/rollback",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/ping",
)
EXEMPT_FROM_200 = (
    "/experts/rollback",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
)
