"""GET /load: how many requests are being answered, as vLLM words it, for load balancers that poll."""

from collections.abc import Callable

from fastapi import APIRouter


def load_routes(num_requests: Callable[[], int]) -> APIRouter:
    """Return the endpoint's routes.

    Args:
        num_requests: requests that were accepted and have not been answered to the end.
    """
    router = APIRouter()

    @router.get("/load", response_model=None)
    async def show_load() -> dict[str, int]:
        """Show the load."""
        return {"server_load": num_requests()}

    return router
