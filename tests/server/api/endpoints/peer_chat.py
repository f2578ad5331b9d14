"""What tests of /v1/chat/completions after vLLM's share."""

from typing import Any

import openai

KEY = {"Authorization": "Bearer sesame"}
HELLO: list[Any] = [
    {"role": "system", "content": "you are a helpful assistant"},
    {"role": "user", "content": "what is 1+1?"},
]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"location": {"type": "string"}}},
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}


def chat(client: openai.OpenAI, messages: Any = HELLO, **how: Any) -> Any:
    """A chat with the model, of a few tokens."""
    return client.chat.completions.create(
        **{"model": "tiny", "messages": messages, "max_completion_tokens": 5, **how}
    )


def said_of(text: str) -> list[dict[str, Any]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]
