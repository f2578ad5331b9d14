"""The tokenizer agrees with transformers."""

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server.front.tokenizer import ChatTemplateError, TemplateFacts, Tokenizer, TokenizerError, facts_of
from tests.support.models.tiny_tokenizer import MAX_LEN, write_tokenizer

CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "héllo 😀 <|end|>"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model"))


def test_chats_and_texts_encode_as_transformers_does(directory: Path) -> None:
    ours, theirs = Tokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)
    text = ours.render_chat(CHAT)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == expected
    for sample in ("hello world", "", " é\n😀"):
        ids = theirs.encode(sample)
        assert ours.encode(sample, add_special_tokens=True) == ids
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_the_ends_of_an_answer_and_the_limits_come_from_the_checkpoint(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.eos_ids == {1}
    assert tokenizer.vocab_size == 320, "the embedding's size, not the tokenizer's"
    assert tokenizer.model_max_len == MAX_LEN


def test_tokens_that_only_the_tokenizer_has_are_none_of_the_model(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    (directory / "config.json").write_text('{"model_type": "mixtral", "vocab_size": 270}')
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 270, 299]}')
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.vocab_size == 270 and tokenizer.eos_ids == {1}
    vocabulary = tokenizer.vocabulary()
    assert len(vocabulary.tokens) == 270 and vocabulary.end_ids == {1}
    assert max(tokenizer.encode("hello world", add_special_tokens=False)) >= 270, "encoding still uses them"


def test_a_token_s_bytes_make_up_the_text_s(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    text = "hello é😀\n"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert tokenizer.token_bytes(0) == b"<|start|>"
    assert tokenizer.token_bytes(319) == b"", "the embedding has this id, the tokenizer does not"


def test_texts_that_are_looked_up_make_up_the_decoded_text(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    drawn = random.Random(1)
    for skips in (False, True):
        lone = tokenizer.lone_texts(skip_special_tokens=skips)
        assert lone is not None
        known = [token_id for token_id in range(330) if lone[token_id] is not None]
        assert (1 in known) is not skips, "a special token"
        for _ in range(50):
            ids = drawn.choices(range(330), k=3) + drawn.choices(known, k=drawn.randrange(1, 6))
            decoded = [tokenizer.decode(each, skip_special_tokens=skips) for each in (ids, ids[:-1])]
            assert decoded[0] == decoded[1] + str(lone[ids[-1]])


def test_a_decoder_that_does_more_than_join_bytes_has_no_texts_to_look_up(tmp_path: Path) -> None:
    directory = write_tokenizer(tmp_path)
    saved = json.loads((directory / "tokenizer.json").read_text())
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    saved["decoder"] = {"type": "Sequence", "decoders": [saved["decoder"], strip]}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(str(directory))
    ids = tokenizer.encode(" cat", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "cat", "the text depends on the context"
    assert tokenizer.lone_texts(skip_special_tokens=True) is None


def test_a_template_s_refusal_is_an_error_for_the_client(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    with pytest.raises(ChatTemplateError, match="unknown role pirate"):
        tokenizer.render_chat([{"role": "pirate", "content": "x"}])
    with pytest.raises(ChatTemplateError, match="chat_template"):
        tokenizer.render_chat(
            CHAT, template_kwargs={"chat_template": "{% for i in range(10**9) %}x{% endfor %}"}
        )


def test_a_last_message_can_be_continued(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Sure, "}]
    text = tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("Sure, ")


def test_no_template_is_said_with_the_way_out(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_tokenizer(tmp_path, chat_template=None)))
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        tokenizer.render_chat(CHAT)


def test_another_template_may_be_given(tmp_path: Path) -> None:
    directory, file = write_tokenizer(tmp_path / "model"), tmp_path / "other.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer(str(directory), str(file))
    assert tokenizer.render_chat(CHAT) == "".join(f"[{message['content']}]" for message in CHAT)
    assert tokenizer.template.text == file.read_text()
    file.write_text("{% for m in messages %}")
    with pytest.raises(TokenizerError, match="--chat-template"):
        Tokenizer(str(directory), str(file))


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=str(tmp_path)):
        Tokenizer(str(tmp_path))


PARTS = "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}"
NAMED = "{% for m in messages %}{% set c = m.content | list %}{% for p in c %}{{ p.text }}{% endfor %}{% endfor %}"
GOT = "{% for m in messages %}{% for part in m.get('content') %}{{ part.text }}{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
NAMED_BOTH = (  # as Kimi-K2 does
    "{% macro show(m) %}{% set c = m.get('content') %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}"
)
TEXT = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "wants_parts"),
    [(PARTS, True), (NAMED, True), (GOT, True), (BOTH, False), (NAMED_BOTH, False), (TEXT, False)],
)
def test_a_template_that_only_loops_over_content_wants_parts(template: str, wants_parts: bool) -> None:
    assert facts_of(template).wants_parts is wants_parts


def test_a_template_knows_tools_if_it_names_them() -> None:
    assert facts_of("{% if tools %}{{ tools | tojson }}{% endif %}").knows_tools
    assert not facts_of("tools {{ message.tools }}").knows_tools


def test_a_template_may_know_calls_and_not_tools() -> None:
    facts = facts_of("{% for m in messages %}{{ m['tool_calls'] }}{% endfor %}")
    assert facts.knows_calls and not facts.knows_tools


def test_transformers_own_tags_are_no_obstacle() -> None:
    facts = facts_of(
        "{%- generation -%}{{ tools }}{% endgeneration %}{% for x in y %}{% break %}{% endfor %}"
    )
    assert facts.knows_tools


def test_several_templates_count_as_one() -> None:
    facts = facts_of({"default": PARTS, "tool_use": "<tool_call>"})
    assert facts.wants_parts and facts.knows_tools and "<tool_call>" in facts.text


def test_what_cannot_be_read_is_taken_as_text() -> None:
    assert facts_of("{% nonsense tools %}") == TemplateFacts(text="{% nonsense tools %}", knows_tools=True)
    assert facts_of(None) == facts_of("") == TemplateFacts()
