"""The results of a run: tables for users, JSON for programs, and a plot.

matplotlib, an optional dependency (`wideep[bench]`), draws the plot, because it supports every format that reports need and
draws good axes and labels. Rejected: writing SVG ourselves, which many image viewers do not support; and Pillow, which is
also an additional dependency and has no axes.
"""

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from server.options.flag import OptionsError
from server.tools.bench.figures import LevelFigures, Spread, e2e_s, ttft_s
from server.tools.bench.flags import Load
from server.tools.bench.stream import StreamedAnswer

_TIMES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2e_ms"))
_PARTS = ("mean", "p50", "p90", "p99")
_LATE_MS = 20.0  # the load generator's own lag is reported above this
_MOST_FAILURES = 3  # different failures to quote


@dataclass(frozen=True, kw_only=True)
class LevelResult:
    """One level of a sweep."""

    load: Load
    value: float
    figures: LevelFigures
    answers: Sequence[StreamedAnswer]
    is_whole: bool  # False if the level was stopped

    @property
    def name(self) -> str:
        """Return the level's name."""
        return f"{self.load} {self.value:g}"

    @property
    def failures(self) -> Counter[str]:
        """Return the number of failed requests by reason."""
        return Counter(answer.failure for answer in self.answers if answer.failure)


def level_lines(result: LevelResult) -> Iterator[str]:
    """Yield the lines about a level."""
    figures = result.figures
    if result.is_whole and not result.answers:
        yield f"{result.name}: no request arrived within the duration; use a longer --duration"
        return
    stopped = "" if result.is_whole else ", stopped"
    yield (
        f"{result.name}: {figures.num_requests} requests in {figures.duration_s:.1f} s{stopped}; "
        f"{figures.requests_per_s:.2f} requests/s, {figures.output_tokens_per_s:,.1f} output tokens/s, "
        f"{figures.total_tokens_per_s:,.1f} total tokens/s"
    )
    yield "      ms" + "".join(f"{part:>11}" for part in _PARTS)
    for title, name in _TIMES:
        yield f"    {title:4}" + "".join(f"{cell:>11}" for cell in _cells(getattr(figures, name)))
    yield f"  {'; '.join(_details(figures))}"
    if figures.late_p99_ms > _LATE_MS:
        yield (
            f"  requests were sent up to {figures.late_p99_ms:,.0f} ms late (p99): this machine is too busy for this load"
        )
    if figures.num_failed:
        yield f"  {figures.num_failed} of {figures.num_requests} requests failed:"
        for failure, count in result.failures.most_common(_MOST_FAILURES):
            yield f"    {count} x {failure}"


def _cells(spread: Spread | None) -> list[str]:
    if spread is None:
        return ["-"] * len(_PARTS)
    return [f"{getattr(spread, part):,.1f}" for part in _PARTS]


def _details(figures: LevelFigures) -> Iterator[str]:
    """Yield descriptions of a level's answers."""
    num_good = max(1, figures.num_requests - figures.num_failed)
    yield f"prompts of {figures.prompt_tokens / num_good:,.0f} tokens, answers of {figures.output_tokens / num_good:,.0f} (means)"
    if figures.prompt_tokens:
        yield f"cache hits {figures.cached_tokens / figures.prompt_tokens:.1%} of the prompts' tokens"
    if figures.tokens_per_chunk > 1.05:
        yield f"{figures.tokens_per_chunk:.2f} tokens per chunk"
    if figures.goodput_per_s is not None:
        share = figures.goodput_per_s * figures.duration_s / max(1, figures.num_requests)
        yield f"goodput {figures.goodput_per_s:.2f} requests/s ({share:.0%} of all)"


def summary_lines(results: Sequence[LevelResult]) -> Iterator[str]:
    """Yield a sweep's table, with a line per level."""
    has_goodput = any(each.figures.goodput_per_s is not None for each in results)
    titles = ["requests/s", "output/s", "total/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "cached"]
    yield f"{results[0].load:>12}" + "".join(f"{title:>11}" for title in titles + ["goodput/s"] * has_goodput)
    for each in results:
        figures = each.figures
        times = [
            (figures.ttft_ms, ("p50", "p99")),
            (figures.tpot_ms, ("p50", "p99")),
            (figures.e2e_ms, ("p50",)),
        ]
        cells = [f"{figures.requests_per_s:.2f}", f"{figures.output_tokens_per_s:,.1f}"]
        cells.append(f"{figures.total_tokens_per_s:,.1f}")
        cells += [
            "-" if spread is None else f"{getattr(spread, part):,.1f}"
            for spread, parts in times
            for part in parts
        ]
        cells.append(f"{figures.cached_tokens / max(1, figures.prompt_tokens):.1%}")
        cells += [f"{figures.goodput_per_s or 0:.2f}"] * has_goodput
        yield f"{each.value:>12g}" + "".join(f"{cell:>11}" for cell in cells)


def json_of(head: dict[str, Any], results: Sequence[LevelResult]) -> str:
    """Return a run as JSON.

    Args:
        head: Fields that describe the run.
    """
    levels = [
        {
            str(each.load): each.value,
            "is_whole": each.is_whole,
            **asdict(each.figures),
            "failures": dict(each.failures),
            "requests": _request_rows(each.answers),
        }
        for each in results
    ]
    return json.dumps({**head, "levels": levels}, indent=1)


def _request_rows(answers: Sequence[StreamedAnswer]) -> list[dict[str, Any]]:
    """Return a row for each request, in the order of sending."""
    sent = sorted(answers, key=lambda each: each.start_s)
    return [_request_row(answer, sent[0].start_s) for answer in sent]


def _request_row(answer: StreamedAnswer, begun_s: float) -> dict[str, Any]:
    times = {
        "start_s": answer.start_s - begun_s,
        "late_s": answer.late_s,
        "ttft_s": ttft_s(answer),
        "e2e_s": e2e_s(answer),
    }
    counts = {name: getattr(answer, name) for name in ("prompt_tokens", "output_tokens", "cached_tokens")}
    failure = {"failure": answer.failure} if answer.failure else {}
    return {**{name: round(value, 6) for name, value in times.items()}, **counts, **failure}


def check_plot(path: Path) -> None:
    """Check before the load whether a plot can be drawn.

    Raises:
        OptionsError: matplotlib is missing, or the file name has no known format.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise OptionsError(f"--plot {path} has an unknown format; the name must end in .png, .svg or .pdf")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise OptionsError("--plot needs matplotlib: pip install 'wideep[bench]'") from error


def write_plot(path: Path, title: str, results: Sequence[LevelResult]) -> None:
    """Plot TTFT and TPOT over output tokens per second, with a point per level."""
    matplotlib: Any = importlib.import_module("matplotlib.figure")
    picture = matplotlib.Figure(figsize=(10, 4.5), layout="constrained")
    picture.suptitle(title, fontsize=10)
    levels = sorted(results, key=lambda each: each.value)
    for axes, (name, field) in zip(picture.subplots(1, 2), _TIMES[:2], strict=True):
        shown = [(each, spread) for each in levels if (spread := getattr(each.figures, field)) is not None]
        across = [each.figures.output_tokens_per_s for each, _ in shown]
        for part, style in (("p50", "o-"), ("p99", "s--")):
            axes.plot(across, [getattr(spread, part) for _, spread in shown], style, label=part)
        for each, spread in shown:
            at = (each.figures.output_tokens_per_s, spread.p50)
            axes.annotate(f"{each.value:g}", at, textcoords="offset points", xytext=(4, 5), fontsize=8)
        axes.set(xlabel="output tokens/s", ylabel=f"{name} in ms")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(title=f"points: {results[0].load}", fontsize=8, title_fontsize=8)
    picture.savefig(path, dpi=150)
