"""langchain-openai: invoke, stream, batch, logprobs, tools and structured output."""

from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

langchain_openai = pytest.importorskip("langchain_openai", reason="needs langchain-openai: make test-clients")

pytestmark = pytest.mark.slow


class City(BaseModel):
    """A city."""

    name: str
    people: int


def chat(front: FrontProcess, **how: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model="tiny",
        base_url=f"{front.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        timeout=TIMEOUT_S,
        **how,
    )


def test_invoke_gives_text_usage_and_finish_reason(front: FrontProcess) -> None:
    front.script("lang-whole", "hello é😀")
    answer = chat(front).invoke([("system", "be brief"), ("user", "lang-whole")])
    assert answer.content == "hello é😀"
    assert answer.usage_metadata["output_tokens"] == len(front.encode("hello é😀"))
    assert answer.response_metadata["finish_reason"] == "stop"


def test_a_stream_gives_text_and_usage(front: FrontProcess) -> None:
    front.script("lang-stream", "hello é😀")
    chunks = list(chat(front, stream_usage=True).stream("lang-stream"))
    assert "".join(chunk.content for chunk in chunks) == "hello é😀"
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == len(
        front.encode("hello é😀")
    )


def test_a_batch_is_answered_in_order(front: FrontProcess) -> None:
    for number in range(4):
        front.script(f"lang-batch-{number}", f"answer {number}")
    answers = chat(front).batch([f"lang-batch-{number}" for number in range(4)])
    assert [answer.content for answer in answers] == [f"answer {number}" for number in range(4)]


def test_logprobs_are_per_token(front: FrontProcess) -> None:
    front.script("lang-logprobs", "ab")
    answer = chat(front, logprobs=True, top_logprobs=2).invoke("lang-logprobs")
    content = answer.response_metadata["logprobs"]["content"]
    assert len(content) == len(front.encode("ab"))
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)


def test_a_history_with_a_tool_message_is_taken(front: FrontProcess) -> None:
    from_tool = [
        ("user", "lang-history"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    ]
    front.script("lang-history", "it is blue")
    assert chat(front).invoke(from_tool).content == "it is blue"


def test_structured_output_by_json_schema(front: FrontProcess) -> None:
    front.script("lang-schema", '{"name": "Rome", "people": 3}')
    bound = chat(front).with_structured_output(City, method="json_schema")
    assert bound.invoke("lang-schema") == City(name="Rome", people=3)
    structure = front.asked("lang-schema").params.structure
    assert structure is not None and structure.kind == "json_schema"


def test_structured_output_by_a_named_tool(front: FrontProcess) -> None:
    front.script("lang-tool", '{"name": "Rome", "people": 3}')
    bound = chat(front).with_structured_output(City, method="function_calling")
    assert bound.invoke("lang-tool") == City(name="Rome", people=3)


def test_a_refusal_is_the_openai_clients_error(front: FrontProcess) -> None:
    with pytest.raises(Exception, match="context length"):
        chat(front).invoke("x" * 9000)


def test_tools_that_the_model_may_call(front: FrontProcess) -> None:
    call = '<tool_call>\n{"name": "City", "arguments": {"name": "Rome", "people": 3}}\n</tool_call>'
    front.script("lang-auto", call)
    bound = chat(front).bind_tools([City])
    [whole] = bound.invoke("lang-auto").tool_calls
    assert (whole["name"], whole["args"]) == ("City", {"name": "Rome", "people": 3})
    merged = None
    for chunk in bound.stream("lang-auto"):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    assert [each["args"] for each in merged.tool_calls] == [{"name": "Rome", "people": 3}]
