"""The part of a request's path that decides its route."""

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """Return the path without the root path that a proxy may or may not have taken off.

    Starlette's router does the same: a guard that looked at the whole path would be walked around.
    """
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
