"""torchrun's rendezvous backend `wideep`: c10d's own, which says for whom it waits.

torchrun starts workers when all nodes have come. Until then none of our processes runs, and `--rdzv-backend c10d` waits for ten
minutes in silence, or gives up after one where the endpoint's node is missing. This backend is c10d's handler over the same store.
Before it, a node waits for the endpoint as long as for the others, and says what the way there lacks; beside it, a
thread reads in the state that c10d keeps in the store who has come. torchrun finds it by the entry point `torchrun.handlers` of our
distribution (torch.distributed.elastic.rendezvous.registry), through `wideep`.
"""

import pickle
import threading
import time

from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend, create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from server.doctor.interfaces import bindable_address
from server.doctor.meeting import SAY_AFTER_S, MeetingError, connect, who_is_here
from server.lines import say
from server.process.store.rendezvous import endpoint_of

JOIN_S = 600  # c10d's own default of join_timeout
_LOOK_S = 0.5


class _Backend(C10dRendezvousBackend):
    """c10d's state in the store, under the name that torchrun has asked for."""

    @property
    def name(self) -> str:
        """See base class."""
        return "wideep"


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Return c10d's handler, once the endpoint can be reached.

    Raises:
        RendezvousConnectionError: it cannot, within --rdzv-conf's join_timeout.
    """
    has_others = params.min_nodes > 1
    if has_others and not _has_endpoint(params):
        _await_endpoint(params)
    _, store = create_backend(params)
    if has_others:
        own = store.clone()  # type: ignore[attr-defined]  # torch's stubs do not have it
        watched = _Backend(own, params.run_id)
        threading.Thread(target=_name_those_here, args=(watched, params.min_nodes), daemon=True).start()
    return create_handler(store, _Backend(store, params.run_id), params)


def _has_endpoint(params: RendezvousParameters) -> bool:
    """Whether this node is to have the store."""
    is_host = params.get_as_bool("is_host")
    return bool(bindable_address(endpoint_of(params.endpoint).host)) if is_host is None else is_host


def _await_endpoint(params: RendezvousParameters) -> None:
    timeout_s = params.get_as_int("join_timeout", JOIN_S) or JOIN_S
    try:
        connect(endpoint_of(params.endpoint), time.monotonic() + timeout_s, _say).close()
    except MeetingError as error:
        raise RendezvousConnectionError(str(error)) from error


def _name_those_here(backend: C10dRendezvousBackend, num_nodes: int) -> None:
    """Say who has come, and again whenever that changes, until all have."""
    begun_s, said = time.monotonic(), list[str]()
    while (here := _nodes_here(backend)) is not None:
        if here and here != said and time.monotonic() - begun_s > SAY_AFTER_S:
            _say(f"waiting for {who_is_here(here, num_nodes)}; start the same line there")
            said = here
        time.sleep(_LOOK_S)


def _nodes_here(backend: C10dRendezvousBackend) -> list[str] | None:
    """Return the addresses of those that have come; None: nobody is waited for any more."""
    try:
        found = backend.get_state()
    except RendezvousError:  # the store is gone; torchrun says so
        return None
    if found is None:
        return []
    state = pickle.loads(found[0])  # as c10d's own handlers do
    return None if state.complete or state.closed else sorted(node.addr for node in state.participants)


def _say(text: str) -> None:
    say(f"wideep: {text}", error=True)
