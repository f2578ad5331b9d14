"""The state of the service that the leading front publishes and the other fronts follow: a file, and its number on the board.

A file outlives the front that leads, so the other fronts continue to serve while it is restarted.
"""

import json
from pathlib import Path
from typing import NamedTuple, Self

from server.front.adapters.places import AdapterFailure, GivenPlace
from server.front.adapters.registry import NamedAdapter
from server.front.several.board import Board
from server.machine.whole_files import replace_text
from server.options.pools import Pool, Role

STATE_FILE = "service.json"


class EngineOfRank(NamedTuple):
    """One engine of a rank: an engine that was restarted has another number of restarts."""

    rank: int
    num_restarts: int


class Pause(NamedTuple):
    """A reason for which requests are kept instead of submitted, see `server.front.requests.Requests.pause`."""

    by: str
    withdraws: bool


class WeightLabel(NamedTuple):
    """The label of a version of the base weights."""

    number: int
    label: str


class ServiceState(NamedTuple):
    """What every front must know of the service."""

    sizes: tuple[int, int]  # the number of ranks, and the one that a resize leads to
    serving: tuple[EngineOfRank, ...] = ()  # engines that get requests
    given_up: tuple[EngineOfRank, ...] = ()  # the newest engine of each rank that the leading front dropped
    draining: tuple[int, ...] = ()  # ranks
    released: tuple[
        int, ...
    ] = ()  # attached ranks of a pool that has not met again: their requests move to other pools
    pools: tuple[Pool, ...] = ()  # with their present roles
    announced: tuple[Pool, ...] = ()  # pools that torchruns bring, and of which no rank has attached
    why_not_ready: str = ""  # why requests are refused; "" if they are accepted
    sleep_level: int = 0
    pauses: tuple[Pause, ...] = ()
    weights: int = 0  # number of the serving version
    labels: tuple[WeightLabel, ...] = ()  # of that version and those around it
    adapters: tuple[NamedAdapter, ...] = ()  # registered names
    places: tuple[GivenPlace, ...] = ()  # of adapters that all ranks have
    failures: tuple[AdapterFailure, ...] = ()  # the last ones, for requests with these adapters
    # These only grow: how often all requests were aborted, and prefixes were forgotten.
    num_aborts: int = 0
    num_forgets: int = 0
    lost_fronts: tuple[int, ...] = ()  # of nodes that do not answer: other fronts answer in their place

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the newest state in the folder of the fronts. Returns None before the first one."""
        try:
            fields = json.loads((folder / STATE_FILE).read_text())
        except FileNotFoundError:
            return None
        serving, given_up = (
            tuple(EngineOfRank(*each) for each in fields.pop(name)) for name in ("serving", "given_up")
        )
        num_ranks, next_num = fields.pop("sizes")
        draining, released, lost_fronts = (
            tuple(fields.pop(name)) for name in ("draining", "released", "lost_fronts")
        )
        pools, announced = (
            tuple(Pool(name, Role(role), *ranks) for name, role, *ranks in fields.pop(kind))
            for kind in ("pools", "announced")
        )
        pauses = tuple(Pause(*each) for each in fields.pop("pauses"))
        labels = tuple(WeightLabel(*each) for each in fields.pop("labels"))
        adapters = tuple(
            NamedAdapter(*each)._replace(owners=tuple(each[-1])) for each in fields.pop("adapters")
        )
        places = tuple(GivenPlace(*each) for each in fields.pop("places"))
        failures = tuple(AdapterFailure(*each) for each in fields.pop("failures"))
        return cls(
            (num_ranks, next_num), serving, given_up, draining, released, pools, announced, pauses=pauses,
            labels=labels, adapters=adapters, places=places, failures=failures, lost_fronts=lost_fronts, **fields,
        )  # fmt: skip

    def publish(self, folder: Path, board: Board) -> int:
        """Replace the file, and return the state's number."""
        replace_text(folder / STATE_FILE, json.dumps(self._asdict(), default=_role_name))
        board.version += 1
        return board.version


def _role_name(role: Role) -> str:
    return role.value
