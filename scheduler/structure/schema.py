"""JSON schemas as trees: places of subschemas, targets of references, and oneOf branches that exclude each other.

llguidance enforces a oneOf only if it can prove that no value fits two branches, and its proof ignores `$ref` and
constants outside of objects. If branches exclude each other, oneOf means the same as anyOf, which llguidance always
enforces. So a oneOf is rewritten if `excludes` proves exclusion: by type, by constants, by ranges of numbers, by a
property that both require but that cannot have a common value, or that one requires and the other forbids. Otherwise it
stays a oneOf.

The vocabulary is that of https://json-schema.org/draft/2020-12, with the older names `definitions`, `dependencies` and
lists under `items`. Constants, enumerations, defaults and examples are data, even if they look like schemas."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin

Schema = Any  # a mapping, or a boolean
_ONE = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_OF_FRAGMENTS = "/?:@!$&'()*+,;=-._~"  # characters that need no escape in fragments (RFC 3986)
_NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")


def with_subschemas(schema: Schema, change: Callable[[Schema, tuple[str, ...]], Schema]) -> Schema:
    """Return a schema with changed direct subschemas. `change` gets each one and its path."""
    if not isinstance(schema, Mapping):
        return schema
    changed = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            changed[key] = {
                name: change(each, (key, name)) if isinstance(each, Mapping | bool) else each
                for name, each in value.items()
            }
        elif key in _LISTS and isinstance(value, list):
            changed[key] = [change(each, (key, str(place))) for place, each in enumerate(value)]
        elif key in _ONE and isinstance(value, Mapping | bool):
            changed[key] = change(value, (key,))
    return changed


def relocated(schema: Schema, root: str) -> Schema:
    """Return a schema for another place in a larger one, with adapted references to itself.

    Args:
        schema: A whole schema with the root `#`.
        root: Its new place, as a fragment such as "#/$defs/0".
    """
    document = Document(schema)

    def move(each: Schema, path: tuple[str, ...]) -> Schema:
        if not isinstance(each, Mapping) or is_resource(each, path):
            return each
        moved = with_subschemas(each, lambda inner, step: move(inner, (*path, *step)))
        target = document.path_of(each.get("$ref"))
        if target is not None:
            moved["$ref"] = root + "".join(f"/{_escaped(step)}" for step in target)
        for key in ("$anchor",) if path else ("$anchor", "$id", "$schema"):
            moved.pop(key, None)  # schemas of two functions may use the same
        return moved

    return move(schema, ())


def _escaped(step: str) -> str:
    """Spell a step of a JSON pointer in a fragment (RFC 6901)."""
    return quote(
        step.replace("~", "~0").replace("/", "~1"),
        safe=_OF_FRAGMENTS.replace("/", ""),
        errors="surrogatepass",
    )


class Document:
    """A whole schema, for looking up references."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._base = str(schema.get("$id", "")) if isinstance(schema, Mapping) else ""
        self._anchors: dict[str, tuple[str, ...]] | None = None
        self._num_left = _MOST_LOOKS

    def is_too_much(self) -> bool:
        """Count one look at a schema. Returns True if the budget for proofs is spent."""
        self._num_left -= 1
        return self._num_left < 0

    def path_of(self, reference: Any) -> tuple[str, ...] | None:
        """Return the path of a reference's target, or None if it does not refer to this schema."""
        if not isinstance(reference, str):
            return None
        try:
            base, fragment = urldefrag(urljoin(self._base, reference))
            if base != urldefrag(self._base)[0]:
                return None
        except ValueError:  # not a URI
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._paths_of_anchors().get(fragment)
        return tuple(step.replace("~1", "/").replace("~0", "~") for step in fragment.split("/")[1:])

    def at(self, reference: Any) -> Schema | None:
        """Return a reference's target, or None if it is not in this schema."""
        path = self.path_of(reference)
        if path is None:
            return None
        found = self.schema
        for step in path:
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
                found = found[int(step)]
            else:
                return None
        return found if isinstance(found, Mapping | bool) else None

    def _paths_of_anchors(self) -> dict[str, tuple[str, ...]]:
        if self._anchors is None:
            self._anchors = {}
            self._note_anchors(self.schema, ())
        return self._anchors

    def _note_anchors(self, schema: Schema, path: tuple[str, ...]) -> Schema:
        if isinstance(schema, Mapping) and isinstance(schema.get("$anchor"), str):
            assert self._anchors is not None, "_paths_of_anchors fills it"
            self._anchors.setdefault(schema["$anchor"], path)
        with_subschemas(schema, lambda inner, step: self._note_anchors(inner, (*path, *step)))
        return schema


def enforceable(schema: Schema) -> Schema:
    """Return an equivalent schema of which llguidance enforces more.

    A oneOf with exclusive branches becomes an anyOf. References are escaped: the common `#/$defs/A B` is not a valid URI.
    """
    document = Document(schema)

    def change(each: Schema, path: tuple[str, ...]) -> Schema:
        if is_resource(each, path):
            return each
        changed = with_subschemas(each, change)
        if isinstance(each, Mapping) and isinstance(each.get("$ref"), str):
            changed["$ref"] = quote(each["$ref"], safe=_OF_FRAGMENTS + "#%", errors="surrogatepass")
        branches = each.get("oneOf") if isinstance(each, Mapping) else None
        all_of = changed.get("allOf", []) if isinstance(changed, dict) else None
        if isinstance(branches, list) and isinstance(all_of, list) and excludes(branches, document):
            any_of = changed.pop("oneOf")
            if "anyOf" in changed:
                changed["allOf"] = [*all_of, {"anyOf": any_of}]
            else:
                changed["anyOf"] = any_of
        return changed

    return change(schema, ())


def is_resource(schema: Schema, path: tuple[str, ...]) -> bool:
    """Whether a subschema has its own `$id`. References in it start there and are left unchanged."""
    return bool(path) and isinstance(schema, Mapping) and "$id" in schema


# --- which schemas exclude each other ---

_ATOMS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
_TYPES = {atom: frozenset((atom,)) for atom in _ATOMS - {"fraction"}} | {
    "number": frozenset(("integer", "fraction"))
}
_MOST_SHAPES = 64  # of one schema
_MOST_PAIRS = 5_000  # of branches compared one by one: 0.1 s
# Schemas and pairs of shapes examined, in total: 0.1 s. Unions that refer to each other would take forever.
_MOST_LOOKS = 10_000
_MOST_DEPTH = 8  # of references and properties followed


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A superset of the values that a schema accepts."""

    atoms: frozenset[str] = _ATOMS
    values: frozenset[str] | None = None  # all possible values, as keys
    low: float = -math.inf  # of numbers
    high: float = math.inf
    properties: Mapping[str, tuple[Schema, ...]] = field(default_factory=dict)
    required: frozenset[str] = frozenset()  # of objects
    closed: tuple[frozenset[str], ...] = ()  # each: the only allowed names of properties

    def and_also(self, other: "_Shape") -> "_Shape":
        values = other.values if self.values is None else self.values
        if self.values is not None and other.values is not None:
            values = self.values & other.values
        names = self.properties.keys() | other.properties.keys()
        return _Shape(
            atoms=self.atoms & other.atoms,
            values=values,
            low=max(self.low, other.low),
            high=min(self.high, other.high),
            properties={
                name: (*self.properties.get(name, ()), *other.properties.get(name, ())) for name in names
            },
            required=self.required | other.required,
            closed=(*self.closed, *other.closed),
        )


def excludes(branches: Sequence[Schema], document: Document) -> bool:
    """Whether it is certain that no value fits two of the branches."""
    shapes = [_shapes(branch, document, _MOST_DEPTH) for branch in branches]
    if not branches:
        return False
    if _differ_by_value(shapes) or _differ_by_property(shapes, document):
        return True
    if len(branches) * (len(branches) - 1) // 2 > _MOST_PAIRS:
        return False
    return all(_disjoint(one, other, document, _MOST_DEPTH) for one, other in combinations(shapes, 2))


def _differ_by_value(shapes: Sequence[Sequence[_Shape]]) -> bool:
    """Whether all branches are lists of constants without a common value."""
    of_branches = [_values(each) for each in shapes]
    known = [values for values in of_branches if values is not None]
    return len(known) == len(shapes) and len(frozenset().union(*known)) == sum(map(len, known))


def _values(shapes: Sequence[_Shape]) -> frozenset[str] | None:
    known = [shape.values for shape in shapes if shape.values is not None]
    return frozenset().union(*known) if len(known) == len(shapes) else None


def _differ_by_property(shapes: Sequence[Sequence[_Shape]], document: Document) -> bool:
    """Whether all branches are objects with a property of distinct constants (a tagged union). Needs one pass."""
    if any(shape.atoms != {"object"} for each in shapes for shape in each):
        return False
    names = frozenset.intersection(*(shape.required for each in shapes for shape in each))
    for name in sorted(names):
        tags = [
            [tag for shape in each for tag in _property_shapes(shape, name, document, _MOST_DEPTH)]
            for each in shapes
        ]
        if _differ_by_value(tags):
            return True
    return False


def _disjoint(one: Sequence[_Shape], other: Sequence[_Shape], document: Document, depth: int) -> bool:
    return all(_shapes_differ(left, right, document, depth) for left, right in product(one, other))


def _shapes_differ(one: _Shape, other: _Shape, document: Document, depth: int) -> bool:
    if document.is_too_much():
        return False
    both = one.and_also(other)
    if both.values is not None and not both.values:
        return True
    atoms = both.atoms
    if both.low > both.high:
        atoms -= _TYPES["number"]
    if "object" in atoms and (
        any(both.required - names for names in both.closed)
        or _a_property_differs(one, other, document, depth)
    ):
        atoms -= {"object"}
    return not atoms


def _a_property_differs(one: _Shape, other: _Shape, document: Document, depth: int) -> bool:
    if depth == 0:
        return False
    names = (one.required | other.required) & one.properties.keys() & other.properties.keys()
    return any(
        _disjoint(
            _property_shapes(one, name, document, depth - 1),
            _property_shapes(other, name, document, depth - 1),
            document,
            depth - 1,
        )
        for name in names
    )


def _property_shapes(shape: _Shape, name: str, document: Document, depth: int) -> list[_Shape]:
    return _intersections([_shapes(each, document, depth) for each in shape.properties.get(name, ())])


def _shapes(schema: Schema, document: Document, depth: int) -> list[_Shape]:
    """Return shapes that together cover a schema's values. Returns [] if it accepts no value."""
    if schema is False:
        return []
    if not isinstance(schema, Mapping) or depth == 0 or document.is_too_much():
        return [_Shape()]
    parts = [[_own_shape(schema)]]
    target = document.at(schema.get("$ref"))
    if target is not None:
        parts.append(_shapes(target, document, depth - 1))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts.append(_union(schema[key], document, depth - 1))
    if isinstance(schema.get("allOf"), list):
        parts += [_shapes(each, document, depth - 1) for each in schema["allOf"]]
    return _intersections(parts)


def _union(schemas: Sequence[Schema], document: Document, depth: int) -> list[_Shape]:
    found: list[_Shape] = []
    for each in schemas:
        found += _shapes(each, document, depth)
        if len(found) > _MOST_SHAPES:
            return [_Shape()]
    return found


def _intersections(parts: Sequence[Sequence[_Shape]]) -> list[_Shape]:
    found = [_Shape()]
    for part in parts:
        if len(found) * len(part) <= _MOST_SHAPES:  # otherwise it is left out, which enlarges the superset
            found = [one.and_also(other) for one in found for other in part]
    return found


def _own_shape(schema: Mapping[str, Any]) -> _Shape:
    """Return the shape that a schema's own keywords describe, without its subschemas."""
    atoms, values = _ATOMS, None
    kinds = schema.get("type")
    if kinds is not None:
        names = kinds if isinstance(kinds, list) else [kinds]
        atoms = frozenset().union(*(_TYPES.get(str(name), frozenset()) for name in names))
    constants = list(_constants(schema))
    if constants:
        sets = [frozenset(_key(value) for value in each if _atom(value) in atoms) for each in constants]
        values = frozenset.intersection(*sets)
        atoms &= frozenset(_atom(value) for value in constants[0])
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required")
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    return _Shape(
        atoms=atoms,
        values=values,
        low=_number(schema, "minimum", -math.inf),
        high=_number(schema, "maximum", math.inf),
        properties={name: (each,) for name, each in properties.items()},
        required=frozenset(map(str, required)) if isinstance(required, list) else frozenset(),
        closed=(frozenset(properties),) if is_closed else (),
    )


def _constants(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    if "const" in schema:
        yield [schema["const"]]
    if isinstance(schema.get("enum"), list):
        yield schema["enum"]


def _number(schema: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = schema.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _atom(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    names = {type(None): "null", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _key(value: Any) -> str:
    """Return a text that is equal for equal JSON values. 1 equals 1.0 but not true."""
    if isinstance(value, list):
        return f"[{','.join(map(_key, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{json.dumps(name)}:{_key(each)}' for name, each in value.items()))}}}"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)
