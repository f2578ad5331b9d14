"""How deep a client's JSON nests: what is rendered, compiled or dumped recursively is measured first."""

from typing import Any


def is_deeper(value: Any, depth: int) -> bool:
    """Tell whether a JSON value has more than `depth` levels of lists and objects, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            child
            for each in level
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
