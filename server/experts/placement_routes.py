"""HTTP for changing the placement: POST /experts/plan, /experts/apply, /experts/rollback, GET /experts/history."""

import dataclasses
import json
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from expert_placement.config import EplbConfig
from expert_placement.control import Proposal
from expert_placement.files import from_json, to_json
from server.errors import bad_request
from server.experts.control import PlacementControl
from server.http.routes import new_router


class PlanWish(BaseModel):
    """How to plan."""

    model_config = ConfigDict(extra="forbid")
    policy: Literal["repair", "shares", "plan"] = "repair"
    max_moved: float | None = Field(default=None, ge=0, le=1)  # part of all slots; None: the service's


class ApplyWish(PlanWish):
    """What to make serve: a placement, or what a plan comes to."""

    placement: dict[str, Any] | None = None


def placement_routes(control: PlacementControl, config: EplbConfig) -> APIRouter:
    """Return the routes."""
    router = new_router()

    def wished(wish: PlanWish) -> EplbConfig:
        return config if wish.max_moved is None else dataclasses.replace(config, max_moved=wish.max_moved)

    async def make_plan(body: PlanWish | None = None) -> Response:
        """What a plan promises and costs, and the placement; nothing changes."""
        wish = body or PlanWish()
        proposal = await control.propose(wish.policy, wished(wish))
        return _json({**summary(proposal), "placement": to_json(proposal.target)})

    async def apply(body: ApplyWish | None = None) -> Response:
        """Make a placement serve; answers when it does, or when it was dropped."""
        wish = body or ApplyWish()
        if wish.placement is None:
            proposal = await control.propose(wish.policy, wished(wish))
            made = summary(proposal)
            return _json(await control.apply(proposal.target, wish.policy, made["reason"], proposal.gain))
        try:
            target = from_json(wish.placement)
        except (ValueError, TypeError, KeyError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise bad_request(f"placement is not a placement: {reason}.", "placement") from error
        return _json(await control.apply(target, "apply", "as asked", None))

    async def rollback() -> Response:
        """Make the placement before the last change serve again."""
        return _json(await control.rollback())

    async def show_history() -> Response:
        """What was decided and done, oldest first."""
        return _json({"history": list(control.history.entries), "serving": to_json(control.serving())})

    router.add_api_route("/experts/plan", make_plan, methods=["POST"], response_model=None)
    router.add_api_route("/experts/apply", apply, methods=["POST"], response_model=None)
    router.add_api_route("/experts/rollback", rollback, methods=["POST"], response_model=None)
    router.add_api_route("/experts/history", show_history, methods=["GET"], response_model=None)
    return router


def summary(proposal: Proposal) -> dict[str, Any]:
    """A proposal as JSON, but for its placement."""
    return {
        "kind": proposal.kind,
        "imbalance_before": round(proposal.imbalance_before, 6),
        "imbalance_after": round(proposal.imbalance_after, 6),
        "predicted_gain": round(proposal.gain, 6),
        "predicted_saved_s": round(proposal.saved_s, 9),  # of a step
        "experts_s": {
            now.name: {
                "share": round(now.share, 6),
                "before": round(now.seconds, 9),
                "after": round(then.seconds, 9),
            }
            for now, then in zip(proposal.before, proposal.after, strict=True)
        },
        "moves": proposal.moves,
        "bytes": proposal.num_bytes,
        "seconds": round(proposal.seconds, 3),
        "reason": proposal.describe(),
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value), media_type="application/json")
