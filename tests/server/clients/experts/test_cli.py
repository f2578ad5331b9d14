"""`wideep experts simulate` and `plan`: tables, JSON, files, and one-line errors."""

import json
from pathlib import Path

import numpy as np
import pytest

from expert_placement.files import load_placement
from expert_placement.nodes import Cluster, Rules
from expert_placement.placement import Placement, imbalance
from expert_placement.plan import plan
from expert_placement.tools.simulate import POLICIES as BUILT
from server.cli import main
from server.clients.experts.cli import POLICIES


@pytest.fixture
def loads(tmp_path: Path) -> list[Path]:
    """Two windows in SGLang's format: a dense layer, then three of 16 experts."""
    rng = np.random.default_rng(0)
    load = np.exp(rng.normal(0, 0.8, (3, 16)))
    paths = []
    for window in range(2):
        rows = [[0.0] * 16, *(load * 1000).round().tolist()]
        path = tmp_path / f"window{window}.json"
        path.write_text(json.dumps({"logical_count": rows}))
        paths.append(path)
        load = load * np.exp(rng.normal(0, 0.3, load.shape))
    return paths


def words(*parts: object) -> list[str]:
    return ["experts", *map(str, parts)]


def test_simulate_prints_a_row_for_each_policy_and_size(
    loads: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--ranks", 4, 8, "--slots", 24]
    assert main(words("simulate", *loads, *sizes, "--policy", *POLICIES)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 windows, 3 layers of 16 experts")
    assert [line.split()[2] for line in lines[2:]] == [*POLICIES, *POLICIES]


def test_simulate_prints_json_for_scripts(loads: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words("simulate", *loads, "--ranks", 4, "--slots", 24, "--json")) == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["shares"]["moved"] == 0.0
    assert rows["repair"]["moved"] < rows["plan"]["moved"]
    assert rows["plan"]["known_mean"] <= rows["even"]["known_mean"] + 1e-9
    assert rows["repair"]["next_mean"] >= 1.0


def test_simulate_tells_phases_apart_that_were_recorded_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, path = np.random.default_rng(3), tmp_path / "load.npz"
    prefill, decode = rng.integers(1, 90, (2, 3, 2, 8))
    prefill[2] = 0
    idle = np.zeros((1, 2, 8), dtype=int)  # a second without any token has no effect
    prefill, decode = (np.concatenate([part[:1], idle, part[1:]]) for part in (prefill, decode))
    np.savez(path, load=prefill + decode, prefill=prefill, decode=decode)
    command = words("simulate", path, "--ranks", 2, "--slots", 10, "--policy", "plan")
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == ["prefill", "decode"]
    assert lines[3].split()[1:] == lines[3].split()[1:5], "moves and time depend only on the policy"
    assert main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    placed = [plan_for((prefill + decode)[window]) for window in (0, 2, 3)]
    known = [imbalance(placed[at], prefill[window]) for at, window in ((0, 0), (1, 2))]
    assert row["phases"]["prefill"]["known_mean"] == pytest.approx(np.mean(known))
    later = [imbalance(placed[at], decode[window]) for at, window in ((0, 2), (1, 3))]
    assert row["phases"]["decode"]["next_worst"] == pytest.approx(np.max(later))
    assert main(words("plan", path, "--ranks", 2, "--slots", 10, "--json")) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == plan_for((prefill + decode).sum(axis=0)).digest()


def plan_for(load: np.ndarray) -> Placement:
    return plan(load, 5, Rules(cluster=Cluster(num_ranks=2))).placement


def test_every_policy_is_explained() -> None:
    assert set(POLICIES) == set(BUILT)


def test_plan_writes_a_placement_and_repairs_it(
    loads: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main(words("plan", loads[0], "--ranks", 4, "--slots", 24, "--out", first)) == 0
    assert "planned  fullest rank / mean 1.0" in capsys.readouterr().out
    assert load_placement(first).slot_expert.shape == (3, 24)
    repair = [
        "--current",
        first,
        "--max-moved",
        0.1,
        "--target",
        1.0,
        "--expert-mb",
        44,
        "--link-gbps",
        400,
        "--json",
    ]
    assert main(words("plan", loads[1], *repair, "--out", second)) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["imbalance_mean"] <= report["imbalance_before_mean"]
    assert report["moves"] <= 0.1 * 72 and report["bytes"] == report["moves"] * 44e6
    assert report["seconds"] == pytest.approx(report["bytes"] / 4 * 8 / 400e9)
    made = load_placement(second)
    assert made.digest() == report["digest"]
    load = np.array(json.loads(loads[1].read_text())["logical_count"])[1:]
    assert imbalance(made, load).mean() == pytest.approx(report["imbalance_mean"])


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        (["--ranks", 4], "a new plan needs --ranks and --slots; for a repair, give --current"),
        (["--ranks", 4, "--slots", 25], "25 slots on 4 ranks: --slots must be a multiple of --ranks"),
        (["--ranks", 4, "--slots", 8], "there are 2 slots per rank; 16 experts on 4 ranks need 4 to 16"),
        (["--ranks", 4, "--slots", 24, "--nodes", 3], "4 ranks on 3 nodes"),
        (["--current", "nowhere.json"], "nowhere.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(
    loads: list[Path], rest: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("plan", loads[0], *rest)) == 2
    error = capsys.readouterr().err
    assert error.startswith("wideep experts plan: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "holds no expert load"),
        ("a.json", '{"counts": []}', 'it must be an object with "logical_count" or "load_history"'),
        ("a.json", '{"logical_count": [1, 2]}', "it must be [windows, layers, experts]"),
        ("a.json", '{"logical_count": [[0, 0]]}', "has no layer with any load"),
        ("a.json", '{"logical_count": [[1, -1]]}', "loads must be numbers from 0 up"),
        ("a.json", '{"load_history": [{}]}', "'logical_expert_load' is missing"),
        ("a.pt", "", "is a PyTorch file"),
        ("a.npz", "", "holds no expert load"),
    ],
)
def test_what_is_no_load_is_refused_by_a_sentence(
    tmp_path: Path, name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(words("simulate", tmp_path / name, "--ranks", 2, "--slots", 2)) == 2
    assert message in capsys.readouterr().err


def test_an_address_is_no_load_and_the_command_that_reads_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["experts", "plan", "http://127.0.0.1:8000", "--ranks", "2", "--slots", "32"])
    message = capsys.readouterr().err
    assert "is a URL; `wideep experts record http://127.0.0.1:8000 --out load.npz`" in message


def test_windows_of_several_files_and_formats_are_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.npz", tmp_path / "two.json"
    np.savez(one, load=np.ones((2, 3, 8)))
    two.write_text(json.dumps({"load_history": [{"logical_expert_load": np.ones((3, 8)).tolist()}]}))
    assert main(words("simulate", one, two, "--ranks", 2, "--slots", 8, "--policy", "plan")) == 0
    assert capsys.readouterr().out.startswith("3 windows, 3 layers of 8 experts")
    np.savez(one, load=np.ones((2, 4, 8)))
    assert main(words("simulate", two, one, "--ranks", 2, "--slots", 8)) == 2
    assert "has 4 layers of 8 experts" in capsys.readouterr().err
