"""Every API refuses video and audio by name, with a 400."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.service.front_process import FrontProcess

CHAT, RESPONSES, MESSAGES, COMPLETIONS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
)
URL = {"url": "data:video/mp4;base64,AAAA"}
VIDEO, AUDIO = (
    {"type": "video_url", "video_url": URL},
    {"type": "input_audio", "input_audio": {"data": "AAAA"}},
)
BLOCK = {"type": "video", "source": {"type": "base64", "media_type": "video/mp4", "data": "AAAA"}}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def result(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "a", "content": [block]}


CASES = [
    (CHAT, {"messages": user(VIDEO)}, "messages.0.content.0", "video"),
    (CHAT, {"messages": user(AUDIO)}, "messages.0.content.0", "audio"),
    (CHAT, {"messages": user(AUDIO | {"type": "audio_url"})}, "messages.0.content.0", "audio"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio", "audio"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "audio": {"voice": "a"}}, "audio", "audio"),
    (RESPONSES, {"input": user(AUDIO)}, "input.0.content.0", "audio"),
    (RESPONSES, {"input": user({"type": "input_video", "video_url": "x"})}, "input.0.content.0", "video"),
    (RESPONSES, {"input": [{"role": "assistant", "content": [AUDIO]}]}, "input.0.content.0", "audio"),
    (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a", "output": [VIDEO]}]}, "input.0.output.0", "video"),
    (MESSAGES, {"max_tokens": 1, "messages": user(BLOCK)}, "messages.0.content.0", "video"),
    (MESSAGES, {"max_tokens": 1, "messages": user(BLOCK | {"type": "audio"})}, "messages.0.content.0", "audio"),
    (MESSAGES, {"max_tokens": 1, "messages": user(result(BLOCK))}, "messages.0.content.0.content.0", "video"),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "audio": "x"}, "audio", "audio"),
    (COMPLETIONS, {"prompt": "x", "images": [VIDEO]}, "images.0", "video"),
    (COMPLETIONS, {"prompt": "x", "images": [AUDIO]}, "images.0", "audio"),
    (COMPLETIONS, {"prompt": "x", "videos": [VIDEO]}, "videos", "video"),
    ("/generate", {"text": "x", "image_data": URL["url"]}, "image_data", "video"),
    ("/generate", {"text": "x", "image_data": ["data:audio/wav;base64,AAAA"]}, "image_data.0", "audio"),
    ("/generate", {"text": "x", "video_data": "x"}, "video_data", "video"),
    ("/generate", {"text": "x", "audio_data": ["x"]}, "audio_data", "audio"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x", "videos": ["AAAA"]}]}, "messages.0.videos", "video"),
    ("/api/chat", {"messages": [{"role": "user", "content": "x"}], "audio": "AAAA"}, "audio", "audio"),
    ("/api/generate", {"prompt": "x", "audios": ["AAAA"]}, "audios", "audio"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "where", "word"), CASES)
def test_video_and_audio_are_refused_by_name(
    path: str, body: dict[str, Any], where: str, word: str, front: FrontProcess
) -> None:
    named = {} if path == "/generate" else {"model": "tiny"}
    answer = front.post(path, json={**named, **body})
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and message.startswith(where), message
    assert f"{word} is not supported" in message


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "empty media", "audio": None}], "audio": None, "max_tokens": 1}),
        ("/generate", {"text": "empty media", "video_data": [], "audio_data": None, "sampling_params": {"max_new_tokens": 1}}),
    ],
)  # fmt: skip
def test_empty_fields_for_media_are_accepted(path: str, body: dict[str, Any], front: FrontProcess) -> None:
    front.script("empty media", "y")
    assert front.post(path, json={"model": "tiny", **body} if path == CHAT else body).status_code == 200
