"""`wideep autoscale`: the requests to the service, the output, and the exit status."""

import json
from typing import Any

import httpx
import pytest

from server.cli import build_parser
from server.clients.autoscale.flags import AUTOSCALE
from server.clients.autoscale.run import run_autoscale
from server.http.client import ServiceClient
from server.options.flag import OptionsError

IMPOSSIBLE = "5 ranks are impossible: the model has 4 experts in a layer"


def series(requests: list[int], *, ranks: int = 2, every_s: float = 30.0) -> dict[str, list[Any]]:
    """Return the series of GET /throughput with these numbers of running requests, on ranks of 10 seats."""
    num = len(requests)
    return {
        "time": [1_000_000.0 + every_s * at for at in range(num)],
        "ranks": [ranks] * num,
        "seats": [10 * ranks] * num,
        "running": requests,
        "waiting": [0] * num,
        "kv_usage": [0.0] * num,
        "predicted_wait_s": [0.0] * num,
        "ttft_p99_s": [None] * num,
        "itl_p99_s": [None] * num,
    }


class PlayedService:
    """A service of 2 ranks that accepts sizes up to a limit, and resizes at once."""

    def __init__(
        self, speeds: list[dict[str, list[Any]]], *, most: int = 4, refusal: tuple[int, str] | None = None
    ) -> None:
        self.size, self.resizes = 2, list[int]()
        self._speeds, self._most, self._refusal = speeds, most, refusal
        self.is_failing = False
        self.operator_size: int | None = None  # set after the first sample
        self.is_refusing = False  # real resizes
        self.newest: dict[str, str | None] = {"operation_id": "older", "error": "rank 7 is lost"}

    def run(self, *words: str) -> int:
        """Run a command line against it, until it has no more speeds."""
        args = build_parser().parse_args(["autoscale", *words])
        http = httpx.Client(transport=httpx.MockTransport(self._answer))
        client = ServiceClient("http://s", http=http)
        return run_autoscale(*AUTOSCALE.prepare(args), environment={}, client=client, sleep=self._sleep)

    def _sleep(self, _seconds: float) -> None:
        if not self._speeds:
            raise KeyboardInterrupt
        self.size = self.operator_size or self.size

    def _state(self, **fields: Any) -> dict[str, Any]:
        return {
            "is_scaling_elastic_ep": False,
            "effective_data_parallel_size": self.size,
            **self.newest,
            **fields,
        }

    def _answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/throughput":
            return httpx.Response(200, json={"series": self._speeds.pop(0)})
        if request.method == "GET":
            return httpx.Response(200, json=self._state())
        form = json.loads(request.content)
        size = form["new_data_parallel_size"]
        if self._refusal is not None:
            return httpx.Response(self._refusal[0], json={"error": {"message": self._refusal[1]}})
        if size > self._most:
            return httpx.Response(400, json={"error": {"message": IMPOSSIBLE}})
        if form.get("dry_run"):
            return httpx.Response(200, json=self._state())
        assert form["wait"] is False and form["operation_id"]
        self.resizes.append(size)
        if self.is_refusing:
            return httpx.Response(409, json={"error": {"message": "it sleeps"}})
        self.newest = {
            "operation_id": form["operation_id"],
            "error": "rank 2 is lost" if self.is_failing else None,
        }
        if self.is_failing:
            return httpx.Response(202, json=self._state(is_scaling_elastic_ep=True))
        self.size = size
        return httpx.Response(202, json=self._state(is_scaling_elastic_ep=True))


BUSY = series([20] * 40 + [2] * 60)


def test_a_dry_run_prints_decisions_of_the_last_hour(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService([BUSY])
    assert service.run("--dry-run", "--max-ranks", "6") == 0
    *lines, summary, now, refused = capsys.readouterr().out.splitlines()
    assert [line[20:].strip() for line in lines] == [
        "2 -> 3  20 running and waiting requests need 2.9 ranks",
        "3 -> 1  2 running and waiting requests needed at most 0.3 ranks for 300 s",
    ]
    assert summary == "2 changes in 50 minutes (100 samples); the load needed at most 2.9 ranks"
    assert now == "the service would have 1 ranks now, and has 2"
    assert refused == f"not 5 ranks: the service refused (400): {IMPOSSIBLE}"
    assert service.resizes == [], "nothing was changed"


def test_a_dry_run_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService([BUSY]).run("--dry-run", "--json", "--max-ranks", "5", "--min-ranks", "2") == 0
    report = json.loads(capsys.readouterr().out)
    first, last = report.pop("decisions")
    assert (first["time_s"], first["before"], first["after"]) == (1_000_030.0, 2, 3)
    assert (last["before"], last["after"]) == (3, 2)
    reason = f"the service refused (400): {IMPOSSIBLE}"
    assert report == {
        "from": 1_000_000.0, "to": 1_002_970.0, "samples": 100, "ranks_then": 2, "ranks_now": 2, "ranks_chosen": 2,
        "most_needed": 2.857, "accepted": [2, 3, 4], "refused": {"5": reason}, "note": "",
    }  # fmt: skip


def test_only_the_last_hour_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService([series([20] * 10 + [8] * 200)]).run("--dry-run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["decisions"], report["samples"]) == ([], 121)


@pytest.mark.parametrize(
    ("speeds", "refusal", "text"),
    [
        ([series([])], None, "the service has no history yet\n"),
        ([series([8] * 20, ranks=0)], None, "the service has no history yet\n"),
        ([BUSY], (409, "rank 1 is missing"), "sizes were not checked: the service refused (409): rank 1 is missing\n"),
        ([BUSY], (400, "it has pools"), "the service accepts no other size; the decisions are those of another autoscaler\n"),
    ],
)  # fmt: skip
def test_a_dry_run_needs_no_service_that_can_be_resized(
    speeds: list[dict[str, list[Any]]],
    refusal: tuple[int, str] | None,
    text: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert PlayedService(speeds, refusal=refusal).run("--dry-run") == 0
    said = capsys.readouterr().out
    assert said.endswith(text) and ("2 -> 3" in said) is (refusal is not None)


def test_a_loop_resizes_until_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService([series([20] * num) for num in range(1, 5)])
    assert service.run("--json") == 0
    assert service.resizes == [3]
    decision = json.loads(capsys.readouterr().out)
    assert (decision["before"], decision["after"]) == (2, 3)


def test_a_loop_goes_on_from_the_size_that_a_failed_resize_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService([series([20] * num) for num in range(1, 5)])
    service.is_failing = True
    assert service.run() == 0
    assert service.resizes == [3, 3, 3], "each after a pause"
    assert "wideep autoscale: 2 ranks serve as before: rank 2 is lost" in capsys.readouterr().err


def test_a_refused_resize_is_not_explained_by_an_older_one(capsys: pytest.CaptureFixture[str]) -> None:
    service = PlayedService([series([20] * num) for num in range(1, 5)])
    service.is_refusing = True
    assert service.run() == 0
    said = capsys.readouterr().err
    assert "wideep autoscale: the service refused (409): it sleeps" in said and "rank 7" not in said


def test_a_loop_follows_an_operator_who_resizes_the_service() -> None:
    service = PlayedService([series([20] * num) for num in range(1, 5)])
    service.operator_size = 4
    assert service.run() == 0
    assert (service.resizes, service.size) == ([], 4), "20 requests need 3 ranks, and 5 minutes are not over"


@pytest.mark.parametrize("status", [400, 409])
def test_a_loop_needs_a_service_that_can_be_resized(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert PlayedService([BUSY], refusal=(status, "The service cannot be resized: it has pools")).run() == 1
    assert (
        f"wideep autoscale: the service refused ({status}): The service cannot be" in capsys.readouterr().err
    )


def test_another_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    args = build_parser().parse_args(["autoscale", "--dry-run", "http://s"])
    http = httpx.Client(transport=httpx.MockTransport(lambda _request: httpx.Response(200, json={})))
    assert run_autoscale(args, environment={}, client=ServiceClient("http://s", http=http)) == 1
    assert "http://s did not return a state of WideEP" in capsys.readouterr().err


@pytest.mark.crossed("words", every=2)
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--min-ranks", "0"), "'0' must be a number of ranks of at least 1"),
        (("--max-ranks", "two"), "'two' must be a number of ranks"),
        (("--max-step", "-1"), "'-1' must be a number of ranks"),
        (("--target-use", "1.5"), "'1.5' must be a number above 0 and at most 1"),
        (("--target-ttft-ms", "0"), "'0' must be a number above 0"),
        (("--target-itl-ms", "nan"), "'nan' must be a number above 0"),
        (("--target-wait-ms", "inf"), "'inf' must be a number above 0"),
        (("--margin", "1"), "'1' must be a number from 0 to below 1"),
        (("--up-after", "-1"), "'-1' must be a number of seconds of at least 0"),
        (("--down-after", "soon"), "'soon' must be a number of seconds"),
    ],
)
def test_a_wrong_flag_is_named(words: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["autoscale", *words])
    assert text in capsys.readouterr().err


def test_limits_in_the_wrong_order_are_named() -> None:
    with pytest.raises(OptionsError, match="--min-ranks is 5, which is more than --max-ranks, 4"):
        PlayedService([BUSY]).run("--min-ranks", "5", "--max-ranks", "4")
