"""The page at /dashboard in a real browser: its charts, its tooltips, and its messages when data is missing."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.placement.load_reports import change, load_answer, series
from tests.support.service import chromium
from tests.support.service.chromium import Chromium
from tests.support.service.dashboard_service import DashboardService, rank_status

ROOT = Path(__file__).resolve().parents[3]
STATIC = ROOT / "server" / "experts" / "dashboard" / "static"
LIVE = "document.body.dataset.state === 'live'"
needs_chromium = pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.MISSING)


@pytest.fixture(scope="module")
def chromium_program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    """One browser for all tests."""
    with Chromium(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def service() -> Iterator[DashboardService]:
    """A service with answers that the test chooses."""
    with DashboardService() as running:
        yield running


@pytest.fixture
def browser(chromium_program: Chromium, service: DashboardService) -> Iterator[Chromium]:
    """The browser. It leaves the page before its service ends, so that the next test sees no errors of this page."""
    yield chromium_program
    chromium_program.call("Page.navigate", url="about:blank")


def text(browser: Chromium, name: str) -> str:
    """Return the text of an element of the page."""
    said = browser.evaluate(f"document.getElementById('{name}').innerText")
    assert isinstance(said, str)
    return said


def hover_cell(browser: Chromium, name: str, row: float, column: float) -> str:
    """Hover over a map at fractions 0 to 1 of its cells and return the tooltip's text."""
    box = browser.evaluate(
        f"""(() => {{ const canvas = document.querySelector('#{name} canvas'); canvas.scrollIntoView();
        const box = canvas.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; }})()"""
    )
    left, right, bottom = 40, 58 if name == "ranks" else 0, 48  # heatmap.js: labels, bars, axis and legend
    browser.hover(
        box[0] + left + column * (box[2] - left - right),
        box[1] + row * (box[3] - bottom),
    )
    return text(browser, "tip")


def test_the_page_and_its_files_come_from_this_service_alone(service: DashboardService) -> None:
    for path in STATIC.iterdir():
        name = "" if path.name == "index.html" else f"/{path.name}"
        answer = httpx.get(service.url + name)
        assert (answer.status_code, answer.content) == (200, path.read_bytes())
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        others = [
            line for line in path.read_text().splitlines() if "://" in line and "www.w3.org" not in line
        ]
        assert not others, "nothing is loaded from another host"
    assert httpx.get(service.url + "/routes.py").status_code == 404
    assert httpx.get(service.url + "/../routes.py").status_code == 404


def test_the_page_is_in_the_distribution() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert "experts/dashboard/static/*" in data["server"]


@needs_chromium
def test_hovering_names_the_expert_and_the_rank(browser: Chromium, service: DashboardService) -> None:
    answer = service.answer = load_answer(4, 16, 2, first_layer=3)
    browser.open(service.url)
    browser.wait_for(LIVE)
    tokens = sum(answer["phases"][phase]["tokens"][2][9] for phase in ("prefill", "decode"))
    said = hover_cell(browser, "experts", 2.5 / 4, 9.5 / 16)
    assert said.splitlines()[0] == "layer 5, expert 9"
    assert f"{tokens:,} tokens" in said
    assert "on rank 1" in said
    tokens = sum(answer["rank_tokens"][phase][0][1] for phase in ("prefill", "decode"))
    said = hover_cell(browser, "ranks", 0.5 / 4, 0.75)
    assert said.splitlines()[0] == "layer 3, rank 1 on node-0"
    assert f"{tokens:,} tokens" in said
    assert "holds 8 experts: 8, 9, 10, 11, 12, 13, 14, 15" in said
    assert not browser.complaints


@needs_chromium
def test_several_pools_have_a_link_to_the_experts_of_each(
    browser: Chromium, service: DashboardService
) -> None:
    service.answer = load_answer(2, 8, 2)
    browser.open(service.url)
    browser.wait_for(LIVE)
    browser.wait_for("document.body.dataset.ranks === 'whole'")
    assert browser.evaluate("document.getElementById('pools').hidden"), "a single pool needs no link"
    (pool,) = service.ranks["pools"]
    pools = [pool | {"pool": name, "role": "prefill"} for name in ("prefill", "decode")]
    service.ranks = {**service.ranks, "pools": pools}
    browser.wait_for("!document.getElementById('pools').hidden")
    assert text(browser, "pools") == "Experts of pool prefill · decode (prefill)", "roles may have changed"
    assert "decode (prefill)" in text(browser, "rank-table")
    browser.evaluate("document.querySelector('#pools a').click()")
    browser.wait_for(f"location.search === '?pool=decode' && document.body && {LIVE}")
    browser.wait_for("!document.getElementById('pools').hidden")
    assert browser.evaluate("document.querySelector('#pools strong').innerText") == "decode (prefill)"
    assert service.asked_pools[0] is None and service.asked_pools[-1] == "decode"
    assert not browser.complaints


@needs_chromium
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_its_balancedness_is_the_services_own(
    browser: Chromium, service: DashboardService, phase: str
) -> None:
    """Balancedness is mean load over the fullest rank's load per layer, averaged over layers. Page and service must agree."""
    answer = service.answer = load_answer(5, 16, 4, seed=7)
    browser.open(service.url)
    browser.wait_for(LIVE)
    browser.evaluate(f"document.querySelector('[value={phase}]').click()")
    expected = answer["phases"][phase]["balancedness"]
    tiles = text(browser, "tiles")
    assert f"{expected['mean']:.3f}" in tiles
    assert f"median {expected['median']:.3f}" in tiles
    assert f"{expected['worst']:.3f}\nlayer {np.argmin(expected['per_layer'])}" in tiles


@needs_chromium
@pytest.mark.parametrize(("layers", "experts", "ranks"), [(94, 128, 32), (58, 256, 320)])
def test_large_models_fit_and_crowded_ranks_share_cells(
    browser: Chromium, service: DashboardService, layers: int, experts: int, ranks: int
) -> None:
    service.answer = load_answer(layers, experts, ranks)
    browser.open(service.url)
    browser.wait_for(LIVE)
    assert text(browser, "shape").startswith(f"{layers} MoE layers")
    last = hover_cell(browser, "experts", 1 - 0.5 / layers, 1 - 0.5 / experts)
    assert last.startswith(f"layer {layers - 1}, expert {experts - 1}\n")
    said = hover_cell(browser, "ranks", 0.5 / layers, 0.001)
    assert said.startswith("layer 0, rank ")
    is_shared = ranks == 320
    assert ("the hottest of" in said) == is_shared
    assert ("A cell is the hottest of" in text(browser, "ranks-note")) == is_shared
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no element overflows"
    assert not browser.complaints


@pytest.mark.slow
@needs_chromium
def test_an_idle_service_says_so_and_comes_alive(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2, tokens_per_layer=0)
    browser.open(service.url)
    browser.wait_for("document.body.dataset.state === 'empty'")
    assert "no token has been routed" in text(browser, "nothing")
    assert "/v1/completions" in text(browser, "try")
    assert browser.evaluate("document.querySelector('main').hidden")
    service.answer = load_answer(2, 8, 2)
    browser.wait_for(LIVE)
    assert browser.evaluate("document.getElementById('nothing').hidden")


@pytest.mark.slow
@needs_chromium
def test_a_service_that_is_gone_is_said_to_be_gone_until_it_is_back(
    browser: Chromium, service: DashboardService
) -> None:
    service.answer = load_answer(2, 8, 2)
    browser.open(service.url)
    browser.wait_for(LIVE)
    service.stop()
    browser.wait_for("document.body.dataset.state === 'gone'")
    assert "does not answer" in text(browser, "banner")
    assert "The figures shown are from" in text(browser, "banner")
    service.start()
    browser.wait_for(LIVE)
    assert browser.evaluate("document.getElementById('banner').hidden")


@needs_chromium
@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (503, {"error": {"message": "waiting for rank 1 of 2"}}, "503: waiting for rank 1 of 2"),
        (200, {"model": "old"}, 'no "layers"'),
        (
            200,
            {**load_answer(2, 8, 2), "rank_tokens": {"prefill": [[1], [2]], "decode": [[1], [2]]}},
            "is not 2 rows of 2 numbers",
        ),
    ],
)
def test_an_answer_without_load_is_named(
    browser: Chromium, service: DashboardService, status: int, answer: dict[str, Any], said: str
) -> None:
    service.status, service.answer = status, answer
    browser.open(service.url)
    browser.wait_for("document.body.dataset.state === 'refused'")
    assert said in text(browser, "banner")


@needs_chromium
def test_a_lost_rank_is_said_until_it_is_back(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 1)
    service.ranks = rank_status(2, lost={1: "its connection <b>closed</b>"})
    browser.open(service.url)
    browser.wait_for("document.body.dataset.ranks === 'lost'")
    browser.wait_for(LIVE)
    said = text(browser, "health")
    assert said.startswith("1 of 2 ranks serve. Rank 1 has been away since ")
    assert "(12 s): its connection <b>closed</b>." in said
    assert text(browser, "status").startswith("1 of 2 ranks, live")
    assert "1 of 2\naway: rank 1" in text(browser, "service")
    assert browser.evaluate("document.title").startswith("(1 of 2 ranks)")
    assert "1.000" not in text(browser, "tiles"), "a single rank is not shown as balanced"
    colours = "['--good', '--bad'].map((name) => getComputedStyle(document.body).getPropertyValue(name))"
    dot = "getComputedStyle(document.getElementById('status'), '::before').backgroundColor"
    assert browser.evaluate(f"{colours}[1]") == "#b3261e" and browser.evaluate(dot) == "rgb(179, 38, 30)"
    service.ranks = rank_status(2)
    service.answer = load_answer(2, 8, 2)
    browser.wait_for("document.getElementById('health').hidden")
    browser.wait_for("document.getElementById('service').innerText.includes('2 of 2')")
    assert not text(browser, "status").startswith("1 of 2")
    assert not browser.complaints


@needs_chromium
def test_ranks_that_cannot_serve_alone_are_said_to_wait(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2)
    service.ranks = rank_status(2, lost={1: "killed"}, waits=True)
    browser.open(service.url)
    browser.wait_for("document.body.dataset.ranks === 'lost'")
    said = text(browser, "health")
    assert said.startswith("0 of 2 ranks serve.") and "No rank can serve until a lost rank is back" in said
    assert "Steps on rank 0 failed: no memory for its experts." in said


@needs_chromium
def test_what_ranks_wait_for_is_a_sentence(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2)
    browser.open(service.url)
    browser.wait_for("document.getElementById('waits').innerText !== ''")
    assert text(browser, "waits") == (
        "Ranks spend 25.0 % of their step time waiting for others: busier experts elsewhere 15.0 %, other causes 5.0 %, "
        "a prompt elsewhere 4.0 %, longer contexts elsewhere 1.0 %."
    )


@needs_chromium
def test_ranks_events_and_the_service_are_shown(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2)
    service.ranks = rank_status(2, lost={1: "its connection <b>closed</b>"})
    browser.open(service.url)
    browser.wait_for(LIVE)
    browser.wait_for("document.querySelectorAll('#rank-table tbody tr').length === 2")
    first, second = browser.evaluate(
        "[...document.querySelectorAll('#rank-table tbody tr')].map((row) => row.innerText)"
    )
    assert first.split("\t")[:5] == ["0", "healthy", "node-0", "4000", "4"]
    assert second.startswith("1\tdead: its connection <b>closed</b>")
    events = text(browser, "events")
    assert "rank lost\tRank 1 is lost: its connection <b>closed</b>." in events
    assert "ranks serve\tEpoch 1: ranks 0 serve.\t400 ms" in events
    assert browser.evaluate("document.querySelectorAll('#ttft .mark.incident').length") == 2
    browser.wait_for("document.getElementById('card').innerText.includes('8,192 tokens')")
    assert "WideEP 0.1.0" in text(browser, "card") and "4xx 0, 429 0, 5xx 0" in text(browser, "card")
    for chart in ("speed", "ttft", "itl", "e2e", "queue", "hits"):
        assert browser.evaluate(f"document.querySelectorAll('#{chart} .line').length") == 2
    assert not browser.complaints
    service.facts = {}
    browser.open(service.url)
    browser.wait_for(LIVE)
    browser.wait_for("document.getElementById('card').innerText.includes('Started')")
    assert "WideEP 0.1.0" not in text(browser, "card"), (
        "with API keys the page shows everything except the facts"
    )


@needs_chromium
def test_tiers_of_the_kv_cache_are_summed_over_nodes_and_a_failed_disk_is_named(
    browser: Chromium, service: DashboardService
) -> None:
    service.answer = load_answer(2, 8, 2)
    browser.open(service.url)
    browser.wait_for("document.getElementById('card').innerText.includes('KV on disk')")
    card = text(browser, "card")
    assert "3 GiB of 8 GiB" in card and "10 GiB of 400 GiB" in card
    assert "4 damaged and 14 dropped blocks" in card and "disabled" not in card
    now = service.throughput["now"]
    wanted = [
        f"{now[name]:.1%}".replace("%", " %")
        for name in ("prefix_hit_rate", "host_hit_rate", "disk_hit_rate")
    ]
    wanted_note = f"prefix hits {wanted[0]} (host {wanted[1]}, disk {wanted[2]}) in the last 10 s"
    browser.wait_for("document.getElementById('service').innerText.includes('prefix hits')")
    assert wanted_note in text(browser, "service")
    service.ranks = rank_status(2, failed_disks=1)
    browser.wait_for("document.getElementById('card').innerText.includes('disabled')")
    assert "10 GiB of 400 GiB, disabled after an error on node-0" in text(browser, "card")
    service.ranks = {**rank_status(2), "tiers": []}
    browser.wait_for("!document.getElementById('card').innerText.includes('KV on disk')")
    assert "KV faults" not in text(browser, "card"), "a service without tiers shows none"
    assert not browser.complaints


@needs_chromium
def test_a_draining_rank_is_shown_with_its_requests(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2)
    service.ranks = {**rank_status(2), "draining": [{"rank": 1, "requests": 3, "seconds": 2.0}]}
    browser.open(service.url)
    browser.wait_for(LIVE)
    browser.wait_for("document.querySelectorAll('#rank-table tbody tr').length === 2")
    assert "1\tdraining, 3 requests left\tnode-1" in text(browser, "rank-table")
    assert "2 of 2\ndraining: rank 1" in text(browser, "service")
    assert browser.evaluate("document.querySelectorAll('#rank-table tr.lost').length") == 0
    assert not browser.complaints


@needs_chromium
def test_the_services_speed_is_in_tiles_and_lines(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(2, 8, 2)
    now = service.throughput["now"]
    browser.open(service.url)
    browser.wait_for("document.querySelectorAll('#speed .line').length === 2")
    tiles = text(browser, "service").splitlines()
    for title, value in (
        ("Generated tokens/s", f"{now['generation_tokens_per_s']:g}"),
        ("Requests running", "8"),
        ("KV cache in use", f"{now['kv_usage']:.1%}".replace("%", " %")),
    ):
        assert tiles[tiles.index(title) + 1] == value
    assert "1 waiting" in tiles and sum(tile.startswith("median; p99 ") for tile in tiles) == 2
    path = "document.querySelector('#speed .line').getAttribute('d').split('L').length"
    whole = browser.evaluate(path)
    assert whole == len(service.throughput["series"]["time"])
    browser.evaluate("document.querySelector('[value=\"300\"]').click()")
    browser.wait_for(f"{path} < {whole}")
    assert browser.evaluate(path) == pytest.approx(150, abs=5), "five minutes with a point every two seconds"
    service.throughput = {}
    browser.wait_for("document.getElementById('service').innerText.includes('\u2013')")
    assert browser.evaluate("document.body.dataset.state") == "live", "the rest of the page stays live"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1600, 1024, 390])
@pytest.mark.parametrize("case", ["whole", "lost", "rebalancing", "gone"])
def test_nothing_sticks_out_or_is_clipped(
    browser: Chromium, service: DashboardService, case: str, width: int, dark: bool
) -> None:
    moved = change(0, 3, "repair", 1_234_567, "saves 8.2 % of a step, and this is how a long reason reads")
    history = [moved] * 5 if case == "rebalancing" else []
    service.answer = load_answer(30, 64, 1 if case == "lost" else 2, history=history)
    service.ranks = rank_status(2, lost={1: "its connection closed"} if case == "lost" else None)
    browser.open(service.url, width=width, dark=dark)
    browser.wait_for(LIVE)
    browser.wait_for("document.querySelectorAll('#speed .line').length === 2")
    if case == "gone":
        service.stop()
        browser.wait_for("document.body.dataset.state === 'gone'")
    clipped = browser.evaluate(
        """[document.documentElement, ...document.querySelectorAll('section, #history, #events, dl > div, .banner, header')]
        .filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.id || each.tagName)"""
    )
    assert clipped == []
    shown = "[...document.querySelectorAll('canvas')].filter((each) => each.offsetParent)"
    heights = browser.evaluate(f"{shown}.map((each) => each.clientHeight)")
    assert len(heights) == (3 if case == "lost" else 4) and all(heights), "one rank has no traffic to show"


@pytest.mark.slow
@needs_chromium
def test_rebalances_are_listed_and_marked_and_markup_in_them_is_text(
    browser: Chromium, service: DashboardService
) -> None:
    service.answer = load_answer(2, 8, 2)
    browser.open(service.url)
    browser.wait_for(LIVE)
    now_s = browser.evaluate("Date.now() / 1000")
    moved = change(0, 1, "repair", 6, "saves <b>8 %</b> of a step")
    dropped = {
        **change(0, 1, "repair", 6, "saves 8 %"),
        "failed": "rank 1: a checksum differs",
        "time": now_s,
    }
    quiet = change(0, 1, "nothing", 0, "too little to gain")
    entries = [{**moved, "time": now_s}, {**quiet, "time": now_s}, dropped]
    past = series([0.6, 0.7, 0.8, 0.9], begin_s=now_s - 600)
    service.answer = {**load_answer(2, 8, 2, history=entries), "series": past}
    browser.wait_for("document.querySelectorAll('#timeline .mark').length === 3")
    line = browser.evaluate("document.querySelector('#timeline .line').getAttribute('d')")
    assert line.count("L") == 4, "from the series' first point to the current window"
    assert browser.evaluate("document.querySelectorAll('#timeline .mark.kept').length") == 2
    rows = text(browser, "history").splitlines()
    assert any("Too little to gain" in row for row in rows)
    assert any("Dropped, because rank 1: a checksum differs" in row for row in rows)
    assert "Saves <b>8 %</b> of a step" in "\n".join(rows)


@needs_chromium
def test_both_themes_draw_and_differ(browser: Chromium, service: DashboardService) -> None:
    service.answer = load_answer(6, 32, 4)
    browser.open(service.url)
    browser.wait_for(LIVE)
    pixel = "[...document.querySelector('#experts canvas').getContext('2d').getImageData(60, 10, 1, 1).data].join()"
    light, light_cell = browser.screenshot(), browser.evaluate(pixel)
    browser.use_theme(dark=True)
    browser.wait_for(f"{pixel} !== '{light_cell}'")
    dark = browser.screenshot()
    for picture in (light, dark):
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000, "the picture is not empty"
    assert light != dark
