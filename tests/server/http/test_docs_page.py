"""The page at /docs: nothing of it comes from other hosts, and a real browser shows every endpoint of the description."""

from pathlib import Path

import pytest

from tests.support.service import chromium
from tests.support.service.chromium import Chromium
from tests.support.service.front_process import FrontProcess

DRAWN = "document.querySelectorAll('details').length > 0"


def test_the_page_is_held_to_itself_and_the_service(front: FrontProcess) -> None:
    page = front.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert "://" not in page.text, "nothing is loaded from another host"
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'self'" in policy


@pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.MISSING)
def test_a_browser_draws_every_endpoint(front: FrontProcess, tmp_path: Path) -> None:
    paths = front.get("/openapi.json").json()["paths"]
    with Chromium(tmp_path / "profile") as browser:
        colours = set()
        for dark in (False, True):
            browser.open(front.url + "/docs", width=390, dark=dark)
            browser.wait_for(DRAWN)
            drawn = browser.evaluate(
                "[...document.querySelectorAll('summary > code')].map((each) => each.innerText)"
            )
            assert sorted(set(drawn)) == sorted(paths)
            colours.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert browser.evaluate("document.documentElement.scrollWidth") <= 390
        assert len(colours) == 2, "light and dark"
        table = "[...document.querySelectorAll('details')].find((each) => each.innerText.includes('/v1/chat/completions'))"
        browser.evaluate(f"{table}.open = true")
        said = browser.evaluate(f"{table}.innerText")
        assert "temperature" in said, "a body's fields"
        rows = browser.evaluate(
            f"[...{table}.querySelectorAll('tr')].map((row) => row.innerText.split('\\t')[0])"
        )
        assert rows[1] == "messages", "required fields come first"
        assert "2^63 - 1" in said and "9223372036854776000" not in said
        assert f"curl -X POST {front.url}/v1/chat/completions" in said and '"content":"Hello"' in said
        groups = browser.evaluate("[...document.querySelectorAll('h2')].map((each) => each.innerText)")
        assert groups == [
            "Answers",
            "Files and batches",
            "Models and tokens",
            "Ollama",
            "Experts",
            "Operation",
        ]
        browser.evaluate(
            "(() => { const filter = document.getElementById('filter'); filter.value = '/api/chat';"
            "filter.dispatchEvent(new Event('input')); })()"
        )
        assert (
            browser.evaluate(
                "[...document.querySelectorAll('details')].filter((each) => !each.hidden).length"
            )
            == 1
        )
        browser.call("Page.navigate", url="about:blank")
