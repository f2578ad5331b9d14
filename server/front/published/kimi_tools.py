"""The form in which Kimi's prompts declare tools: sorted, and from K2.5 on as TypeScript.

The checkpoints' chat templates expect what their `tokenization_kimi.py` prepares: tools with all object keys sorted, and, if
the template has a variable `tools_ts_str`, a text with one TypeScript type per function (`tool_declaration_ts.py` of
moonshotai/Kimi-K2.5). This module writes that text. For a schema that the published form does not cover it returns
None, and the template writes JSON, like the published code.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

VARIABLE = "tools_ts_str"  # in the chat template
_INDENT = "  "
_LIMITS = {  # limits that a comment lists, by type
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null",
    "object": "{}", "array": "Array<any>",
}  # fmt: skip
_ENUM_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "number": (int, float), "integer": int, "boolean": bool,
}  # fmt: skip


class _NotCoveredError(ValueError):
    """A schema that this module cannot write in TypeScript."""


def prepared(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tools for Kimi's templates, and the template variables that declare them."""
    in_order: list[dict[str, Any]] = sorted_keys(tools)
    declared = typescript_of(in_order)
    return in_order, {} if declared is None else {VARIABLE: declared}


def sorted_keys(value: Any) -> Any:
    """Return JSON with the keys of all objects sorted."""
    if isinstance(value, Mapping):
        return {key: sorted_keys(each) for key, each in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [sorted_keys(each) for each in value]
    return value


def typescript_of(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the declaration of tools in OpenAI's form, or None if a schema is not covered."""
    functions = [
        tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return ""
    try:
        declared = "\n".join(map(_function, functions))
    except (_NotCoveredError, AttributeError, KeyError, TypeError):  # any malformed schema of a client
        return None
    return f"# Tools\n\n## functions\nnamespace functions {{\n{declared}\n}}\n"


def _function(function: Mapping[str, Any]) -> str:
    """Return a function's type, after the interfaces that its parameters refer to."""
    schema = function.get("parameters") or {}
    references = _References(schema)
    parameters = references.object_type(schema, "")
    blocks = []
    if references.has_self:
        fields = ",\n".join(references.field(*field, _INDENT) for field in _fields(schema))
        blocks.append(f"interface parameters {{\n{fields}\n}}" if fields else "interface parameters {}")
        parameters = "parameters"
    blocks += references.interfaces()
    if function.get("description"):
        blocks.append(_comment(function["description"], ""))
    return "\n".join([*blocks, f"type {function.get('name', 'function')} = (_: {parameters}) => any;"])


class _References:
    """The named schemas of one function's parameters, and references to them."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._definitions: dict[str, Any] = {}
        self.has_self = False
        self._collect(schema)

    def _collect(self, schema: Any) -> None:
        """Collect the definitions of a schema and its nested objects. A reference must follow its definition."""
        if not isinstance(schema, Mapping) or not schema:
            return
        if "$ref" in schema:
            self._reference(schema["$ref"])
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                self._collect(each)
        elif schema.get("type") == "array":
            self._collect(schema.get("items"))
        else:
            self._definitions |= schema.get("$defs") or {}
            self._collect(schema.get("additionalProperties"))
            for each in (schema.get("properties") or {}).values():
                self._collect(each)

    def interfaces(self) -> Iterator[str]:
        """Yield the definitions as interfaces."""
        for name, schema in tuple(self._definitions.items()):
            self._collect(schema)
            description = schema.get("description")
            before = _comment(description, "") + "\n" if description else ""
            yield f"{before}interface {name} {self.type(schema, '')}"

    def type(self, schema: Any, indent: str) -> str:
        """Return a schema's type."""
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self.type(each, indent) for each in schema["anyOf"])
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_UNION_NAMES[each] for each in kind)
        if kind == "object":
            return self.object_type(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if kind is None and schema:
            raise _NotCoveredError(f"a schema without a type: {schema}")
        return "number" if kind == "integer" else str(kind or "any")

    def object_type(self, schema: Mapping[str, Any], indent: str) -> str:
        """Return an object's type: required fields first, then optional ones, each sorted by name."""
        inner = indent + _INDENT
        fields = sorted(_fields(schema), key=lambda field: (field[2], field[0]))
        lines = [self.field(*field, inner) for field in fields]
        more = schema.get("additionalProperties")
        if more is not None:
            names = {True: "any", False: "never"}
            lines.append(
                f"{inner}[k: string]: {names[more] if isinstance(more, bool) else self.type(more, inner)}"
            )
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def field(self, name: str, schema: Any, is_optional: bool, indent: str) -> str:
        """Return a field, preceded by comments for what its type cannot express."""
        before = _comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            written = (
                repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            )
            before += f"{indent}// Default: {written}\n"
        return f"{before}{indent}{name}{'?' if is_optional else ''}: {self.type(schema, indent)}"

    def _array(self, schema: Mapping[str, Any], indent: str) -> str:
        items, inner = schema.get("items") or {}, indent + _INDENT
        comments = _comments(items, inner)
        if not comments:
            return f"Array<{self.type(items, indent)}>"
        return f"Array<\n{comments}{inner}{self.type(items, inner)}\n{indent}>"

    def _reference(self, target: str) -> str:
        if target == "#":
            self.has_self = True
            return "parameters"
        name = target.rpartition("/")[2]
        if not target.startswith("#/$defs/") or not isinstance(self._definitions.get(name), Mapping):
            raise _NotCoveredError(f"a reference to {target}")
        return name


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name, the schema and the optionality of each field of an object."""
    required = schema.get("required") or ()
    for name, each in (schema.get("properties") or {}).items():
        yield name, each, name not in required


def _enum(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [each for each in kind if each != "null"] if len(kind) == 2 and "null" in kind else kind
        if len(kinds) != 1:
            raise _NotCoveredError(f"an enum of several types: {kind}")
        kind = kinds[0]
    expected = _ENUM_TYPES.get(str(kind))
    if expected and not all(each is None or isinstance(each, expected) for each in schema["enum"]):
        raise _NotCoveredError(f"an enum of {kind} with other values: {schema['enum']}")
    return " | ".join(f'"{each}"' if isinstance(each, str) else str(each) for each in schema["enum"])


def _comments(schema: Any, indent: str) -> str:
    """Return a schema's description and limits as comment lines."""
    if not isinstance(schema, Mapping):
        return ""
    lines = [_comment(schema["description"], indent)] if schema.get("description") else []
    is_plain = not {"$ref", "anyOf", "enum"} & schema.keys()
    kind = schema.get("type")
    names = _LIMITS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    if limits := [f"{name}: {schema[name]}" for name in sorted(names) if name in schema]:
        lines.append(f"{indent}// {', '.join(limits)}")
    return "".join(f"{line}\n" for line in lines)


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
