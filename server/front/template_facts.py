"""What a chat template takes, read from its code: content as text or as parts, and whether it knows tools.

Templates do not declare it. One that loops over a message's content and never asks whether it is a string wants a list
of parts (vLLM detects this from the syntax tree, too); every other gets text. One that never mentions `tools` would
drop them in silence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
from jinja2 import nodes

_CALLS = "tool_calls"
_GENERATION = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")  # transformers' own tag; parsed without it


@dataclass(frozen=True, kw_only=True)
class TemplateFacts:
    """About one model's template; the defaults are those of no template."""

    text: str = ""
    wants_parts: bool = False
    knows_tools: bool = False
    knows_calls: bool = False  # of a history's messages


def facts_of(template: str | Mapping[str, str] | None) -> TemplateFacts:
    """Read a template, or several by name ("default" and "tool_use", as transformers keeps them)."""
    if not template:
        return TemplateFacts()
    if not isinstance(template, str):
        default = facts_of(template.get("default", ""))
        return TemplateFacts(
            text="\n".join(template.values()),
            wants_parts=default.wants_parts,
            knows_tools=default.knows_tools or "tool_use" in template,
            knows_calls=default.knows_calls or "tool_use" in template,
        )
    try:
        tree = parse_template(template)
    except jinja2.TemplateSyntaxError:  # an extension that only the rendering side has
        return TemplateFacts(text=template, knows_tools="tools" in template, knows_calls=_CALLS in template)
    return TemplateFacts(
        text=template,
        wants_parts=_wants_parts(tree),
        knows_tools=any(name.name == "tools" for name in tree.find_all(nodes.Name)),
        knows_calls=_CALLS in template,
    )


def parse_template(template: str) -> nodes.Template:
    """Read a template's syntax tree.

    Raises:
        jinja2.TemplateSyntaxError: it is none.
    """
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"])
    return environment.parse(_GENERATION.sub("", template))


def _wants_parts(tree: nodes.Template) -> bool:
    """Tell whether content is looped over, and never asked whether it is text."""
    names = {"content"} | {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    asks = any(test.name == "string" and _is_content(test.node, names) for test in tree.find_all(nodes.Test))
    return not asks and any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, names: set[str]) -> bool:
    """Tell whether an expression is a message's content, or a name for it."""
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get":
        return bool(node.args) and isinstance(node.args[0], nodes.Const) and node.args[0].value == "content"
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
