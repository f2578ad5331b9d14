"""GET and POST /pools: the pools of the service with their roles, and a change of a role while serving."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from server.front import errors
from server.front.members.pool_roles import PoolRoles
from server.http.routes import new_router
from server.options.pools import Role


class RoleForm(BaseModel):
    """A pool and its new role."""

    model_config = ConfigDict(extra="forbid")
    pool: str
    role: Role


def pool_routes(roles: PoolRoles, why_not_ready: Callable[[], str | None]) -> APIRouter:
    """Return the routes.

    Args:
        why_not_ready: Returns None while some rank serves, and otherwise the reason.
    """
    router = new_router()

    async def show_pools() -> dict[str, Any]:
        """Return the pools with their roles, ranks and loads."""
        return roles.to_json()

    async def change_role(body: RoleForm) -> dict[str, Any]:
        """Give a pool another role. Requests continue, and move if the pool no longer decodes. Returns all pools."""
        if (reason := why_not_ready()) is not None:
            raise errors.not_ready(reason)
        roles.change(body.pool, body.role)
        return roles.to_json()

    router.add_api_route("/pools", show_pools, methods=["GET"], response_model=None)
    router.add_api_route("/pools", change_role, methods=["POST"], response_model=None)
    return router
