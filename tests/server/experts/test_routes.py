"""The endpoints about experts on a real front with scripted reports of its ranks, and the command line on top of them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from scheduler.moves.reports import LoadReport
from server.cli import main
from tests.support.placement.load_reports import EXPERTS, RANKS, counts, expert_map, report
from tests.support.service.front_process import FrontProcess

START, STOP, DUMP = (f"/{verb}_expert_distribution_record" for verb in ("start", "stop", "dump"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for dumps."""
    return tmp_path_factory.mktemp("records")


@pytest.fixture(scope="module")
def front(model_dir: Path, directory: Path) -> Iterator[FrontProcess]:
    """A front with a key. Its rank 0 has not reported its experts yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(directory))
        process = FrontProcess(model_dir, "--served-model-name", "tiny", "--api-key", "sesame").attach_all()
    yield process
    process.close()


@pytest.fixture(scope="module")
def http(front: FrontProcess) -> Iterator[httpx.Client]:
    """A client with the key."""
    with httpx.Client(base_url=front.url, headers={"Authorization": "Bearer sesame"}, timeout=60) as client:
        yield client


def tell(front: FrontProcess, http: httpx.Client, *reports: LoadReport) -> None:
    """Have ranks report, and wait until the front has all reports."""
    for each in reports:
        front.ranks[each.rank].link.send(each)
    wanted = {each.rank: each.figures.steps for each in reports}
    for _ in range(1000):
        ranks = http.get("/experts/load").json()["ranks"]
        if all(rank["steps"] >= wanted.get(rank["rank"], 0) for rank in ranks):
            return
    raise AssertionError("the reports did not arrive")


def test_the_whole_story_of_a_record(
    front: FrontProcess,
    http: httpx.Client,
    directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One test, because the front's state changes: unknown, known, recording, stopped, dumped."""
    early = http.get("/experts/load")
    assert early.status_code == 503
    assert "the experts are not known yet" in early.json()["error"]["message"]
    front.ranks[0].link.send(expert_map())
    for _ in range(1000):
        if http.get("/experts/load").status_code == 200:
            break
    assert http.get("/experts/load").json()["window"]["steps"] == 0

    assert httpx.post(front.url + START).status_code == 401, "changes need the key"
    assert httpx.get(front.url + "/experts/load").status_code == 200, "reading does not"
    assert httpx.get(front.url + "/experts/record").status_code == 401, (
        "except for records, which are expensive"
    )
    for path in (STOP, DUMP):
        refused = http.post(path)
        assert refused.status_code == 400
        assert "start_expert_distribution_record" in refused.json()["error"]["message"]
    assert http.get("/experts/record").status_code == 400

    tell(front, http, *(report(rank, 5, counts(rank)) for rank in range(RANKS)))
    started = http.post(START)
    assert (started.status_code, started.text) == (200, "Start recording expert distribution.\n")
    assert "no step" in http.get("/experts/record").json()["error"]["message"]
    tell(front, http, *(report(rank, 9, 3 * counts(rank)) for rank in range(RANKS)))
    assert http.post(STOP).status_code == 200
    tell(front, http, *(report(rank, 12, 9 * counts(rank)) for rank in range(RANKS)))

    expected = 2 * (counts(0) + counts(1))[..., :EXPERTS]
    with np.load(io.BytesIO(http.get("/experts/record").content), allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["load"].sum(axis=0), expected.sum(axis=1))
    dumped = http.post(DUMP)
    assert dumped.text.startswith("Dump expert distribution record.\n")
    paths = [Path(line) for line in dumped.text.splitlines()[1:]]
    assert [path.suffix for path in paths] == [".pt", ".json", ".npz"]
    assert all(
        path.parent == directory and path.name.startswith("expert_distribution_recorder_") for path in paths
    )
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600] * 3
    logical = np.array(json.loads(paths[1].read_text())["logical_count"]).sum(axis=0)
    np.testing.assert_array_equal(logical[[2, 3, 5]], expected.sum(axis=1))
    assert http.post(DUMP).status_code == 400, "a dump clears the record"

    assert "vllm:eplb_balancedness_avg" in http.get("/metrics").text
    assert main(["experts", "load", front.url]) == 0
    said = capsys.readouterr().out
    assert "tiny: 3 MoE layers of 6 experts in 3 slots on each of 2 ranks" in said
    assert main(["experts", "load", front.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == http.get("/experts/load").json()
