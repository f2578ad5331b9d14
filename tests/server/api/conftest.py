"""One front with scripted ranks and API keys for the tests of all endpoints. Its model writes Qwen3's markup,
partly in special tokens."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.models.tiny_tokenizer import write_tokenizer
from tests.support.service.front_process import TIMEOUT_S, FrontProcess

TEMPLATE = (
    "{% if tools %}<|start|>system\nCall with <tool_call>:"
    "{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant', 'tool') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<|start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="package")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """A running front that serves the names "tiny" and "claude-alias" and requires one of two keys."""
    special = ("<tool_call>", "</tool_call>", "<|noise|>")
    model = write_tokenizer(tmp_path_factory.mktemp("model"), chat_template=TEMPLATE, special_tokens=special)
    keys = ("--api-key", "sesame", "--api-key", "second")
    flags = (
        "--served-model-name",
        "tiny",
        "claude-alias",
        "--enable-per-request-metrics",
        "--disable-log-stats",
    )
    process = FrontProcess(model, *flags, *keys).attach_all()
    process.headers = {"Authorization": "Bearer sesame"}
    yield process
    status, said = process.close()
    assert (status, said) == (0, ""), "the front prints nothing when it exits"


@pytest.fixture(scope="package")
def client(front: FrontProcess) -> Iterator[openai.OpenAI]:
    """The official client, without retries: they would hide failures."""
    with openai.OpenAI(
        base_url=front.url + "/v1", api_key="sesame", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made
