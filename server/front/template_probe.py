"""Find out what a chat template does with a message's content, by rendering small chats.

Templates do not declare what they accept: some expect text, some a list of parts, many accept both and join the parts in
their own way. vLLM decides by the syntax tree (`renderers/hf.py`, `_detect_content_format`), which misses content that goes
through a macro, and mistakes a list of calls for content if one variable serves both. A chat with two marks in it is
unambiguous: the output has the marks, or lacks them, or has the printed list. A role that no chat can probe (if the template
demands tools, for example) is left to the syntax tree.
"""

import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

_FIRST, _SECOND = "probe-of-part-one", "probe-of-part-two"
_LIST = re.compile(rf"""["']text\\?["']: *\\?["']{_FIRST}""")  # a list, printed by Python or as JSON
_CALL = {  # the id has the length that Mistral's templates demand
    "id": "call00001",
    "type": "function",
    "function": {"name": "probe", "arguments": {}},
}

Render = Callable[[list[dict[str, Any]]], str | None]  # returns None if the template refuses the chat


class ContentForm(Enum):
    """The form of message content that a template accepts."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


def content_forms(render: Render) -> Mapping[str, ContentForm]:
    """Return the form by role. Roles that cannot be probed are missing."""
    forms = {}
    for role in ("system", "user", "assistant", "tool"):
        takes_text = _shows(render, role, f"{_FIRST} {_SECOND}")
        takes_parts = _shows(render, role, [{"type": "text", "text": each} for each in (_FIRST, _SECOND)])
        if takes_text and takes_parts:
            forms[role] = ContentForm.EITHER
        elif takes_text or takes_parts:
            forms[role] = ContentForm.TEXT if takes_text else ContentForm.PARTS
    return forms


def _shows(render: Render, role: str, content: Any) -> bool:
    """Return whether a message's text is rendered, and not the list that holds it."""
    # If the probed message is a list, the others are too: a template may demand lists everywhere.
    is_list = isinstance(content, list)
    before: Any = [{"type": "text", "text": "before"}] if is_list else "before"
    empty: Any = [] if is_list else ""
    user = {"role": "user", "content": before}
    message: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        called = {"role": "assistant", "content": empty, "tool_calls": [_CALL]}
        chat = [user, called, message | {"tool_call_id": _CALL["id"], "name": "probe"}]
    else:
        chat = {"system": [message, user], "user": [message], "assistant": [user, message, user]}[role]
    text = render(chat)
    return text is not None and not _LIST.search(text) and _FIRST in text and _SECOND in text


def shows_instructions(render: Render, form: ContentForm, *roles: str, is_late: bool = False) -> bool | None:
    """Return whether instructions in these roles are all rendered: at the head, or the last one between the turns.

    Args:
        render: Renders a chat.
        form: Form of the content of all messages.
        roles: Roles of the instructions, in order.

    Returns None if the template refuses even a chat without instructions.
    """
    asks, answers, goes_on = (_message(role, role, form) for role in ("user", "assistant", "user"))
    given = [_message(role, f"{_FIRST}-{place}", form) for place, role in enumerate(roles)]
    chat = [*given[:-1], asks, answers, given[-1], goes_on] if is_late else [*given, asks]
    text = render(chat)
    if text is None:
        return None if render([asks]) is None else False
    return all(f"{_FIRST}-{place}" in text for place in range(len(roles)))


def _message(role: str, text: str, form: ContentForm) -> dict[str, Any]:
    content: Any = [{"type": "text", "text": text}] if form is ContentForm.PARTS else text
    return {"role": role, "content": content}
