"""The LoRA adapters of the service by name. `server.front.adapters.places` has their places at the ranks.

Names may be given to another content, and two names may have the same.
"""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import read_adapter
from server.front.adapters.places import AdapterPlaces, PlaceUse, RanksWithAdapters
from server.front.errors import ApiError, bad_request
from server.front.events import EventLog
from server.front.ordering import wait_until
from server.machine.whole_files import replace_text

MAX_NAME_CHARS = 256
FOLLOW_S = 10.0  # for other fronts to learn a name
_POLL_S = 0.05  # while the ranks are awaited
_LOG = logging.getLogger("wideep.front")


class NamedAdapter(NamedTuple):
    """A name that the ranks have checked."""

    name: str
    directory: str
    digest: str
    created: int  # seconds since 1970
    is_pinned: bool = False
    owners: tuple[str, ...] = ()  # digests of the API keys that may use it; () means all

    def is_for(self, owner: str) -> bool:
        """Return whether the key with this digest may use it."""
        return not self.owners or owner in self.owners


class AdapterUse(NamedTuple):
    """What is visible of one adapter."""

    named: NamedAdapter
    at_ranks: PlaceUse


class KnownAdapters(ABC):
    """The names of adapters: `Adapters`, or `server.front.several.followed_adapters.FollowedAdapters`."""

    def __init__(self, *, is_enabled: bool) -> None:
        """Begin without names. `is_enabled`: whether the service has adapters."""
        self.is_enabled = is_enabled
        self._names: dict[str, NamedAdapter] = {}

    def names_for(self, owner: str) -> tuple[str, ...]:
        """Return the names that the API key with this digest may use."""
        return tuple(name for name, named in self._names.items() if named.is_for(owner))

    def find(self, name: str) -> NamedAdapter | None:
        """Return a registered adapter, or None."""
        return self._names.get(name)

    @abstractmethod
    def uses(self) -> Iterator[AdapterUse]:
        """Yield what is visible of each registered adapter."""

    def why_not_ready(self) -> str | None:
        """Return why registered names may be missing, or None if all are known."""
        return None


class Adapters(KnownAdapters):
    """The registered adapters. Runs in the front's event loop."""

    def __init__(
        self,
        ranks: RanksWithAdapters,
        *,
        num_places: int,
        max_rank: int,
        base_names: tuple[str, ...],
        modules: tuple[str, ...] = (),
        kept: Path | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        in_epochs: Callable[[], Collection[int]] | None = None,
    ) -> None:
        """Begin without adapters.

        Args:
            num_places: Places of the ranks; 0 if the service has no adapters.
            max_rank: Largest rank of an adapter.
            base_names: Names of the base model, which no adapter may have.
            modules: Modules that adapters may change, as in `read_adapter`.
            kept: File for the registered names, from which a restarted front continues. None keeps none.
            in_epochs: As for `AdapterPlaces`.
        """
        super().__init__(is_enabled=num_places > 0)
        self._max_rank, self._modules, self._base_names = max_rank, modules, base_names
        self._kept, self._events = kept, events or EventLog()
        self._why_starting: str | None = None
        self._coming: dict[str, _Kept] = {}  # names of the start that are not registered yet
        self.places = AdapterPlaces(ranks, num_places, clock, in_epochs)
        self._clock = clock
        self.places.on_broken = self._remove_broken
        self.on_broken: Callable[[], None] = lambda: None  # ranks may have cached wrong prefixes
        self.places.on_cleared = lambda: self.on_broken()
        # Returns whether all other fronts, if there are any, know the present names.
        self.all_follow: Callable[[], bool] = lambda: True

    @property
    def registered(self) -> tuple[NamedAdapter, ...]:
        """The registered adapters."""
        return tuple(self._names.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The registered names."""
        return tuple(self._names)

    def uses(self) -> Iterator[AdapterUse]:
        for named in self._names.values():
            yield AdapterUse(named, self.places.use_of(named.digest))

    def why_not_ready(self) -> str | None:
        """Return why the service is not ready, or None: the adapters of the start are not checked yet."""
        return self._why_starting

    async def start(self, modules: Mapping[str, str], is_ready: Callable[[], bool]) -> None:
        """Register the adapters of the start, once the ranks serve, or those of a front that this one replaces.

        Of the latter, adapters that are refused by now are left out.

        Raises:
            ApiError: One of the start is refused; the message names it.
        """
        before = self._read_kept()
        self._coming = (
            {name: _Kept(name, path) for name, path in modules.items()} if before is None else before
        )
        if not self._coming:
            return
        self._why_starting = "its adapters are being loaded"
        for kept in list(self._coming.values()):
            try:
                await self._load_from_start(kept, is_ready)
            except ApiError as error:
                if before is None:
                    raise ApiError(
                        error.status, f"The adapter {kept.name!r} cannot be served: {error.message}"
                    ) from error
                self._events.note("adapter_refused", f"the adapter {kept.name} is removed: {error.message}")
            except OSError as error:
                if before is None:
                    raise
                self._events.note("adapter_refused", f"the adapter {kept.name} is removed: {error}")
            self._coming.pop(kept.name, None)
        self._keep()
        self._why_starting = None

    async def _load_from_start(self, kept: "_Kept", is_ready: Callable[[], bool]) -> None:
        """Load one adapter once the ranks serve, and again if they are lost meanwhile.

        Raises:
            ApiError: It is refused.
            OSError: Its files cannot be read.
        """
        why_again = ""
        while True:
            while not is_ready():
                await asyncio.sleep(_POLL_S)
            if (
                kept.name in self._names or kept.name not in self._coming
            ):  # a client has loaded or unloaded it
                return
            try:
                await self.load(
                    kept.name, kept.directory, is_pinned=kept.is_pinned, owners=tuple(kept.owners)
                )
                if kept.name not in self._coming:  # a client has unloaded it meanwhile
                    self.unload(kept.name)
                return
            except ApiError as error:
                if kept.name in self._names:
                    return
                if error.status < 500:
                    raise
                if error.message != why_again:
                    why_again = error.message
                    _LOG.warning("the adapter %s is not loaded yet: %s", kept.name, why_again)
            await asyncio.sleep(_POLL_S)

    async def load(
        self,
        name: str,
        path: str,
        *,
        replaces: bool = False,
        is_pinned: bool | None = None,
        owners: tuple[str, ...] | None = None,
    ) -> NamedAdapter:
        """Check an adapter on all ranks, then register it. Nothing is registered if any rank refuses it.

        Args:
            path: Directory in PEFT's format, on every node.
            replaces: Accept a name that is registered: later requests use the new content.
            is_pinned: Never let another adapter have its place. None keeps what the replaced one has.
            owners: Digests of the API keys that may use it. () means all, None those of the replaced one.

        Raises:
            ApiError: 400 if the adapter or its name is refused; 503 or 504 if the ranks do not answer.
        """
        self._check_name(name, replaces=replaces, is_pinned=bool(is_pinned))
        try:
            files = await asyncio.to_thread(
                read_adapter, Path(path).absolute(), max_rank=self._max_rank, modules=self._modules
            )
        except AdapterError as error:
            raise bad_request(f"The adapter is not supported: {error}.", "lora_path") from error
        directory = str(files.directory)
        num_bytes = await self.places.check(files.digest, directory)
        self._check_name(name, replaces=replaces, is_pinned=bool(is_pinned))  # again: it took a while
        before = self._names.get(name)
        replaced = before or self._coming.get(name)
        if is_pinned is None:
            is_pinned = replaced is not None and replaced.is_pinned
        if owners is None:
            owners = () if replaced is None else tuple(replaced.owners)
        self.places.add_name(files.digest, directory, num_bytes, name, is_pinned=is_pinned)
        named = NamedAdapter(name, directory, files.digest, int(time.time()), is_pinned, owners)
        self._names[name] = named
        if before is not None and before.digest != files.digest:
            self.places.drop_name(before.digest, name)
        self._keep()
        self._events.note("adapter_loaded", f"the adapter {name} is registered (digest {files.digest})")
        return named

    def unload(self, name: str) -> None:
        """Remove a name. Its accepted requests end as usual.

        Raises:
            ApiError: 404 if it is not registered.
        """
        coming, named = self._coming.pop(name, None), self._names.pop(name, None)
        if coming is None and named is None:
            raise self.unknown(name)
        if named is not None:
            self.places.drop_name(named.digest, name)
        self._keep()
        self._events.note("adapter_unloaded", f"the adapter {name} is removed")

    async def wait_followed(self) -> None:
        """Wait until every front knows the names, for a bounded time."""
        await wait_until(self.all_follow, self._clock() + FOLLOW_S, self._clock)

    def unknown(self, name: str) -> ApiError:
        """Return a 404 for a name that is not registered."""
        shown = ", ".join(map(repr, self._names)) or "none"
        return ApiError(
            404, f"The adapter {name!r} is not loaded. Loaded adapters: {shown}.", param="lora_name"
        )

    def _check_name(self, name: str, *, replaces: bool, is_pinned: bool) -> None:
        if not self.is_enabled:
            raise bad_request("This server was started without --enable-lora.", "lora_name")
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise bad_request(f"lora_name must have 1 to {MAX_NAME_CHARS} printable characters.", "lora_name")
        if name in self._base_names:
            raise bad_request(f"{name!r} is a name of the base model; choose another.", "lora_name")
        if name in self._names and not replaces:
            raise bad_request(
                f"The adapter {name!r} is loaded already; unload it first, or send load_inplace=true.",
                "lora_name",
            )
        num_pinned = sum(each.is_pinned for each in self._names.values() if each.name != name)
        if is_pinned and num_pinned + 1 >= len(self.places):
            raise bad_request(
                f"{num_pinned} adapters are pinned already, and one of {len(self.places)} adapter slots must stay "
                "free for others (--max-loras).",
                "pinned",
            )

    def _remove_broken(self, names: list[str], reason: str) -> None:
        for name in names:
            del self._names[name]
        self._keep()
        self._events.note("adapter_refused", f"an adapter is removed: {reason}")
        self.on_broken()

    def _keep(self) -> None:
        if self._kept is not None:
            kept = self._coming | {
                each.name: _Kept(each.name, each.directory, each.is_pinned, each.owners)
                for each in self._names.values()
            }
            try:
                replace_text(self._kept, json.dumps([*kept.values()]))
            except OSError as error:
                _LOG.error("the names of adapters are not kept for a restart of the front: %s", error)

    def _read_kept(self) -> dict[str, "_Kept"] | None:
        """Return what the front before this one has kept, or None at the start of the service."""
        if self._kept is None or not self._kept.exists():
            return None
        kept = [_Kept(*fields) for fields in json.loads(self._kept.read_text())]
        return {each.name: each for each in kept}


class _Kept(NamedTuple):
    """What a restarted front needs of a registered name."""

    name: str
    directory: str
    is_pinned: bool = False
    owners: tuple[str, ...] = ()
