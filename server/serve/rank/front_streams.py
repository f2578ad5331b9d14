"""This rank's connections to several fronts (`--api-server-count`, `--fronts per-node`): one to each.

A request's outputs go to the front that submitted it. All fronts get the rank's statistics, because each routes by them: with their
outputs, or at least every STATS_S while the rank works. Orders, reports and heartbeats concern the leading front only. If a front
is killed, the requests of the others continue. A front on another node than the leading one may be lost with its node, for good.
"""

import os
import threading
import time
from collections.abc import Mapping
from typing import Any

from scheduler.assembly import Assembled
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, RequestOutput
from server.serve.child_messages import num_per_node, ranks_addresses
from server.serve.rank.front_stream import FrontStream, StandbyFront

STATS_S = 0.02
_AGAIN_S = 5.0  # between two times of looking for the front of a lost node


class OtherFront(FrontStream):
    """The connection to a front that does not lead."""

    def __init__(self, owners: dict[str, FrontStream], *place: Any, **how: Any) -> None:
        """Args: owners gets the connection of each open request. The other arguments are those of `FrontStream`."""
        super().__init__(*place, **how, leads=False)
        self._owners = owners

    def attach(self, timeout_s: float, *, is_restart: bool = False) -> None:
        """Attach. The front of a restarted engine may be restarting, too, so this does not wait for it."""
        if is_restart:
            threading.Thread(target=self._attach_later, daemon=True).start()
        else:
            super().attach(timeout_s)

    def _attach_later(self) -> None:
        status = self._come_back(time.monotonic() + self._config.front_recovery_timeout_s)
        if status:
            os._exit(status)

    def _note_open(self, request_id: str) -> None:
        self._owners[request_id] = self
        super()._note_open(request_id)

    def _is_told(self, output: RequestOutput) -> bool:
        is_told = super()._is_told(output)
        is_end = output.finish_reason is not None or output.is_returned
        if is_end and output.request_id not in self._open_ids:
            self._owners.pop(output.request_id, None)
        return is_told


class FrontOfNode(OtherFront):
    """The connection to a front of a node that does not lead, and without which the service continues."""

    def _come_back(self, until_s: float) -> int:
        """Attach to the front as soon as there is one."""
        while super()._come_back(until_s):
            time.sleep(_AGAIN_S)
            until_s = time.monotonic() + _AGAIN_S
        return 0


class SeveralFronts(FrontStream):
    """The connection to the leading front, and with it the others."""

    def __init__(
        self,
        built: Assembled,
        config: EngineConfig,
        front: dict[str, str],
        environment: Mapping[str, str],
        *,
        standby: StandbyFront | None = None,
        **how: Any,
    ) -> None:
        """Prepare the links; `attach` attaches. Arguments as for `FrontStream`. The standby has as many fronts."""
        super().__init__(built, config, front, environment, standby=standby, **how)
        self._owners: dict[str, FrontStream] = {}  # of the others' open requests
        self._sent_s: dict[FrontStream, float] = {}  # time.monotonic() of the last statistics
        addresses = _others_of(front)
        standbys: list[StandbyFront | None] = [None] * len(addresses)
        if standby is not None:
            # The leading front's stream moves this rank to the standby's store.
            standbys = [StandbyFront(each, lambda: None) for each in _others_of(standby.addresses)]
        num_leading = num_per_node(front) or 1 + len(addresses)  # fronts on the node that leads
        self._others = [
            (OtherFront if number < num_leading else FrontOfNode)(
                self._owners, built, config, each, environment, standby=beside, **how
            )
            for number, (each, beside) in enumerate(zip(addresses, standbys, strict=True), start=1)
        ]

    def attach(self, timeout_s: float, *, is_restart: bool = False) -> None:
        super().attach(timeout_s, is_restart=is_restart)
        for each in self._others:
            each.attach(timeout_s, is_restart=is_restart)

    def send(self, outputs: list[RequestOutput], stats: RankStats) -> None:
        by_front: dict[FrontStream, list[RequestOutput]] = {}
        for output in outputs:
            by_front.setdefault(self._owners.get(output.request_id, self), []).append(output)
        now_s, is_idle = time.monotonic(), not stats.num_step_tokens
        for front in (self, *self._others):
            own = by_front.get(front, [])
            if own or is_idle or now_s - self._sent_s.get(front, 0.0) >= STATS_S:
                self._sent_s[front] = now_s
                FrontStream.send(front, own, stats)

    def close(self, reason: str = "") -> None:
        for each in self._others:
            each.close(reason)
        super().close(reason)


def _others_of(front: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the addresses of each other front, in the form of the leading one's."""
    return [{**front, "ranks_address": address} for address in ranks_addresses(front)[1:]]


def front_stream(
    built: Assembled, config: EngineConfig, front: dict[str, str], environment: Mapping[str, str], **how: Any
) -> FrontStream:
    """Return the connection to the front, or to all fronts. Arguments as for `FrontStream`."""
    kind = SeveralFronts if len(ranks_addresses(front)) > 1 else FrontStream
    return kind(built, config, front, environment, **how)
