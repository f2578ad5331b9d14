"""/pools on a front with scripted ranks: requests are handed over by role, roles change, and clients see no difference."""

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from expert_placement.placement import linear_placement
from tests.server.front.test_front_recovery import BODIES, GATE, ask, metric, present, status
from tests.support.service.front_process import TIMEOUT_S, FrontProcess
from tests.support.service.service_processes import wait_until

ANSWER = "one two three four"
KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontProcess]:
    """A front with a pool of each role and an operator's key. All prompts are long enough for a hand-over."""
    keys = tmp_path_factory.mktemp("keys") / "operators"
    keys.write_text("sesame\n")
    flags = ("--pools=prefill:1,decode:1", "--prefill-threshold=0", f"--operator-key-file={keys}")
    process = FrontProcess(model_dir, "--served-model-name=m", *flags)
    process.headers = KEY
    process.attach_all()
    for rank, pool in enumerate(("prefill", "decode")):
        process.ranks[rank].begin(linear_placement(2, 4, 1))
        wait_until(
            lambda: process.get(f"/experts/history?pool={pool}").status_code == 200,  # noqa: B023
            lambda: "the placement is not known",
        )
    yield process
    assert process.close()[0] == 0


@pytest.fixture(autouse=True)
def first_roles(front: FrontProcess) -> Iterator[None]:
    """Give all pools their first roles after a test."""
    yield
    for pool, role in (("prefill", "both"), ("decode", "decode"), ("prefill", "prefill")):
        assert change(front, pool, role).status_code == 200


def change(front: FrontProcess, pool: str, role: str, **how: Any) -> httpx.Response:
    return front.post("/pools", json={"pool": pool, "role": role}, **how)


def handed_over(front: FrontProcess) -> float:
    found = re.search(
        r'^wideep:request_moves_total{cause="hand_over".*} (\S+)$', front.get("/metrics").text, re.M
    )
    assert found is not None
    return float(found.group(1))


@pytest.mark.crossed("kind", every=2)
@pytest.mark.parametrize("kind", list(BODIES))
def test_every_answer_is_the_same_and_every_choice_is_handed_over_once(
    front: FrontProcess, kind: str
) -> None:
    path, body = BODIES[kind]
    front.script("f-say", ANSWER, num_cached_tokens=1)
    assert change(front, "decode", "both").status_code == 200
    assert change(front, "prefill", "both").status_code == 200
    before = handed_over(front)
    expected = ask(front, path, body)
    assert handed_over(front) == before
    assert change(front, "prefill", "prefill").status_code == 200
    assert change(front, "decode", "decode").status_code == 200
    assert ask(front, path, body) == expected
    assert handed_over(front) == before + body.get("n", 1)
    assert present(front, 0).requests[-1].hands_over and not present(front, 1).requests[-1].hands_over
    assert all(not rank.wrong_replays for rank in front.ranks)


def test_a_lost_pool_leaves_its_requests_to_the_other(front: FrontProcess) -> None:
    gate = threading.Event()
    front.script("h-say", ANSWER)
    expected = ask(front, "/v1/completions", {"prompt": "h-say"})
    front.script("h-say", ANSWER, gates={GATE: gate})
    with ThreadPoolExecutor() as threads:
        asked = threads.submit(ask, front, "/v1/completions", {"prompt": "h-say"})
        present(front, 1).wait_for(lambda rank: rank.num_open > 0)
        present(front, 1).kill()
        wait_until(lambda: status(front)["members"] == [0], lambda: "the loss is not seen")
        gate.set()
        assert asked.result(TIMEOUT_S) == expected
    assert ask(front, "/v1/completions", {"prompt": "h-say"}) == expected
    front.attach(1, num_restarts=1)
    wait_until(lambda: status(front)["members"] == [0, 1], lambda: "the rank is not back")
    before = handed_over(front)
    assert ask(front, "/v1/completions", {"prompt": "h-say"}) == expected
    assert handed_over(front) == before + 1


def test_anyone_sees_pools_and_operators_change_their_roles(front: FrontProcess) -> None:
    shown = front.get("/pools", headers={}).json()
    assert shown["roles"] == "fixed"
    assert [(each["name"], each["role"], each["ranks"], each["serving"]) for each in shown["pools"]] == [
        ("prefill", "prefill", [0], 1),
        ("decode", "decode", [1], 1),
    ]
    for headers, code in (({}, 401), ({"Authorization": "Bearer other"}, 403)):
        assert change(front, "prefill", "both", headers=headers).status_code == code
    changed = change(front, "prefill", "both").json()
    assert changed["pools"][0]["role"] == "both"
    assert any(event["kind"] == "role" for event in status(front)["events"])


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"pool": "other", "role": "both"}, 400, "Pool 'other' does not exist"),
        ({"pool": "decode", "role": "prefill"}, 409, "no other pool has the role decode or both"),
        ({"pool": "decode", "role": "all"}, 400, "role"),
        ({"pool": "decode"}, 400, "role"),
        ({"pool": "decode", "role": "both", "how": 1}, 400, "how"),
    ],
)
def test_invalid_changes_are_refused(
    front: FrontProcess, body: dict[str, Any], status: int, word: str
) -> None:
    refused = front.post("/pools", json=body)
    assert refused.status_code == status and word in refused.text


def test_waiting_choices_leave_no_load_behind(front: FrontProcess) -> None:
    front.script("i-say", ANSWER)
    with ThreadPoolExecutor(8) as threads:
        for each in [
            threads.submit(ask, front, "/v1/completions", {"prompt": "i-say", "n": 3}) for _ in range(8)
        ]:
            each.result(TIMEOUT_S)
    assert metric(front, "wideep:router_outstanding_tokens") == 0
    assert metric(front, "wideep:front_open_choices") == 0
