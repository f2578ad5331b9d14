"""instructor: typed answers, by a named tool and by JSON schema, whole and streamed."""

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.service.front_process import TIMEOUT_S, FrontProcess

instructor = pytest.importorskip("instructor", reason="needs instructor: make test-clients")

pytestmark = pytest.mark.slow


class City(BaseModel):
    """A city."""

    name: str
    people: int


ROME = City(name="Rome", people=3)


def client(front: FrontProcess, mode: str) -> Any:
    made = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
    return instructor.from_openai(made, mode=instructor.Mode[mode])


def ask(front: FrontProcess, mode: str, word: str) -> Any:
    return client(front, mode).chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": word}], response_model=City, max_retries=0
    )


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_an_answer_is_typed(front: FrontProcess, mode: str) -> None:
    front.script(f"inst-{mode}", ROME.model_dump_json())
    assert ask(front, mode, f"inst-{mode}").model_dump() == ROME.model_dump()


def test_a_partial_answer_grows(front: FrontProcess) -> None:
    front.script("inst-partial", ROME.model_dump_json())
    pieces = list(
        client(front, "TOOLS").chat.completions.create_partial(
            model="tiny", messages=[{"role": "user", "content": "inst-partial"}], response_model=City
        )
    )
    assert (pieces[-1].name, pieces[-1].people) == ("Rome", 3)


def test_a_wrong_answer_is_asked_again_with_the_reason(front: FrontProcess) -> None:
    front.script("validation error", ROME.model_dump_json())  # instructor quotes pydantic when it retries
    front.script("inst-again", '{"name": "Rome"}')
    answer = client(front, "JSON_SCHEMA").chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "inst-again"}],
        response_model=City,
        max_retries=1,
    )
    assert answer.model_dump() == ROME.model_dump()
