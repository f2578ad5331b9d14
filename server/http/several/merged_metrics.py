"""One scrape of several fronts: the metrics of all of them, as if they were one.

Counters and histograms are sums. Of gauges, those of a front's own work are sums (`_SUMMED`), and the others describe ranks or
the service: they are the leading front's. A killed front's counters stay in the sums as they were last scraped, so that no
counter that Prometheus has seen becomes smaller; what the front counted after that is lost. Each front's last metrics are
in a file for this, because the leading front may be killed, too. A front of a node that does not answer may still run: it counts
as it was last scraped until it answers or has a replacement. Counters of the ranks' own reports (`_OF_RANKS`) are not kept: ranks
report totals, which the replacement of the leading front counts again from the start of each engine.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prometheus_client.utils import floatToGoString

from server.front.several.board import Cell
from server.front.several.seat import Seat
from server.machine.whole_files import replace_text

_LOG = logging.getLogger("wideep.front")
FETCH_S = 5.0  # for another front's metrics
_SUMMED = (
    *("wideep:front_", "wideep:router_outstanding_tokens", "wideep:parked_choices"),
    *("process_resident_memory_bytes", "process_virtual_memory_bytes", "process_open_fds"),
)
_OF_RANKS = (
    *("vllm:prefix_cache_", "vllm:num_preemptions", "vllm:iteration_tokens_total", "vllm:spec_decode_"),
    *("vllm:prompt_tokens_cached_by_source", "vllm:external_prefix_cache_", "vllm:kv_offload_"),
    *("wideep:kv_", "wideep:rank_losses"),
)
_SAMPLE = re.compile(r"(?P<series>[^\s{]+(?:\{.*\})?) (?P<value>\S+)")
_OLD = "ended.prom"  # the sums of processes that have ended


@dataclass
class _Family:
    """The samples of one metric, by series, in order."""

    head: list[str] = field(default_factory=list)  # its comments
    kind: str = "untyped"
    samples: dict[str, float] = field(default_factory=dict)


def merge(texts: Iterable[str], ended: Iterable[str] = ()) -> str:
    """Return the metrics of a service.

    Args:
        texts: Those of the running fronts, the leading one first.
        ended: Those of ended processes, of which only counters and histograms are used.
    """
    merged: dict[str, _Family] = {}
    for text in texts:
        for name, family in _parse(text).items():
            _add(merged, name, family, is_sum=family.kind != "gauge" or name.startswith(_SUMMED))
    for text in ended:
        for name, family in _parse(text).items():
            if family.kind in ("counter", "histogram") and not name.startswith(_OF_RANKS):
                _add(merged, name, family, is_sum=True)
    return _written(merged)


def _add(merged: dict[str, _Family], name: str, family: _Family, *, is_sum: bool) -> None:
    known = merged.setdefault(name, _Family(family.head, family.kind))
    for series, value in family.samples.items():
        # The time of creation is not a count.
        is_counted = is_sum and not series.partition("{")[0].endswith("_created")
        if series not in known.samples:
            known.samples[series] = value
        elif is_counted:
            known.samples[series] += value


def _parse(text: str) -> dict[str, _Family]:
    """Return the families of a text. Samples follow their family's comments, as `prometheus_client` writes them."""
    families: dict[str, _Family] = {}
    family = _Family()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            family = families.setdefault(name, _Family())
            family.head.append(line)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            family.kind = kind
            family.head.append(line)
        elif found := _SAMPLE.fullmatch(line):
            family.samples[found["series"]] = float(found["value"])
    return families


def _written(families: dict[str, _Family]) -> str:
    lines: list[str] = []
    for family in families.values():
        lines += family.head
        lines += [f"{series} {floatToGoString(value)}" for series, value in family.samples.items()]
    return "\n".join(lines) + "\n"


class ServiceMetrics:
    """The metrics of the whole service, for the leading front."""

    def __init__(
        self,
        own_text: Callable[[], Awaitable[bytes]],
        seat: Seat,
        fetch: Callable[[int], Awaitable[bytes]],
    ) -> None:
        """Args: own_text returns this front's metrics; fetch returns those of another front."""
        self._own_text, self._seat, self._fetch = own_text, seat, fetch
        self._writing = asyncio.Lock()

    async def text(self) -> bytes:
        """Return everything in Prometheus' text format. Fronts that do not answer count as they were last scraped."""
        async with self._writing:
            board = self._seat.board
            pids = {each: board.read(Cell.PID, each) for each in range(self._seat.num_fronts)}
            others = [each for each in board.others() if board.is_running(each)]
            found = await asyncio.gather(
                self._own_text(), *(self._fetch(each) for each in others), return_exceptions=True
            )
            texts: dict[int, str] = {}
            for number, text in zip([self._seat.number, *others], found, strict=True):
                if isinstance(text, bytes):
                    texts[number] = text.decode()
                elif isinstance(text, httpx.HTTPError):
                    _LOG.warning("front %d does not report its metrics: %s", number, type(text).__name__)
                else:
                    raise text
            return (await asyncio.to_thread(self._merged, texts, pids)).encode()

    def _merged(self, texts: dict[int, str], pids: dict[int, int]) -> str:
        folder = self._seat.folder
        for number, text in texts.items():
            with _tolerating_a_full_disk():
                _keep(_file_of(folder, number, pids[number]), text)
        answering = {_file_of(folder, number, pids[number]) for number in texts}
        living = {_file_of(folder, number, pid) for number, pid in pids.items()}
        old = folder / _OLD
        silent = [path for path in folder.glob("metrics-*.prom") if path not in answering]
        # Without a process number, the front is on a node that does not answer: the same process may come back.
        gone = [path for path in silent if path not in living and pids[_front_of(path)]]
        if gone:  # their sums are kept in one file
            kept = [old.read_text()] if old.exists() else []
            with _tolerating_a_full_disk():
                replace_text(old, merge((), [*kept, *(path.read_text() for path in gone)]))
                for path in gone:
                    path.unlink()
        ended = [path.read_text() for path in (old, *silent) if path.exists()]
        return merge(texts.values(), ended)


@contextlib.contextmanager
def _tolerating_a_full_disk() -> Iterator[None]:
    """Log a failed write. The scrape is complete without it, unless a front is killed before the next one."""
    try:
        yield
    except OSError as error:
        _LOG.warning("metrics are not kept for a restart of a front: %s", error.strerror)


def _keep(path: Path, text: str) -> None:
    """Replace a process's metrics. Those of another process with the same number, on another machine, stay as ended."""
    if path.exists() and _start_of(path.read_text()) != _start_of(text):
        path.rename(path.with_stem(f"{path.stem}-ended"))
    replace_text(path, text)


def _start_of(text: str) -> str:
    """Return when the process started that these metrics describe, or "" on a system without this figure."""
    return next((line for line in text.splitlines() if line.startswith("process_start_time_seconds ")), "")


def _file_of(folder: Path, number: int, pid: int) -> Path:
    return folder / f"metrics-{number}-{pid}.prom"


def _front_of(path: Path) -> int:
    """Return the number of the front that a file belongs to."""
    return int(path.name.split("-")[1])
