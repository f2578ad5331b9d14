"""A real service that `wideep autoscale` watches and resizes."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.faults.test_faults import bodies
from tests.support.requests.timed_streams import stream_all
from tests.support.service.forked import WIDEEP
from tests.support.service.real_service import START_S, RealService
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealService]:
    log = tmp_path_factory.mktemp("service") / "output.txt"
    flags = ["-dp=1", "--max-num-seqs=8", "--target-ttft-ms=60000", "--max-rank-restarts=20"]
    with RealService.serve(model, log, *flags) as running:
        yield running.wait_ready()


def autoscale(service: RealService, *flags: str) -> list[str]:
    return [*WIDEEP, "autoscale", service.url, *flags]


def dry_run(service: RealService, *flags: str) -> dict[str, Any]:
    command = autoscale(service, "--dry-run", "--json", *flags)
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout))


def num_ranks(service: RealService) -> int:
    return int(httpx.get(f"{service.url}/is_scaling_elastic_ep").json()["effective_data_parallel_size"])


def test_metrics_have_the_wait_and_the_share_of_requests_within_the_target(service: RealService) -> None:
    stream_all(service.url, bodies())
    text = httpx.get(f"{service.url}/metrics").text
    assert 'wideep:slo_attainment{model_name="tiny",slo="ttft"} 1.0' in text
    assert 'wideep:predicted_wait_seconds{model_name="tiny"} ' in text
    now = httpx.get(f"{service.url}/throughput").json()["now"]
    assert (now["ranks"], now["seats"], now["ttft_attainment"]) == (1, 8, 1.0)


def test_a_dry_run_shows_sizes_that_the_service_refuses_and_changes_nothing(service: RealService) -> None:
    stream_all(service.url, bodies())
    wait_until(lambda: dry_run(service)["samples"] > 1, service.output)
    report = dry_run(service, "--max-ranks", "99")
    assert report["accepted"][0] == 1 and report["ranks_now"] == 1
    assert "ranks are impossible: " in report["refused"]["99"]
    assert num_ranks(service) == 1


def test_a_running_autoscaler_grows_the_service_under_load_and_shrinks_it_afterwards(
    service: RealService,
) -> None:
    before = [each.said for each in stream_all(service.url, bodies())]
    flags = ["--max-ranks=2", "--target-use=0.05", "--up-after=0", "--down-after=20", "--json"]
    process = subprocess.Popen(autoscale(service, *flags), stdout=subprocess.PIPE, text=True)
    try:
        said: list[Any] = []

        def has_grown() -> bool:
            said.append([each.said for each in stream_all(service.url, bodies())])
            return num_ranks(service) == 2

        wait_until(has_grown, service.output, within_s=START_S)
        assert all(each == before for each in said), "no answer changes"
        wait_until(lambda: num_ranks(service) == 1, service.output, within_s=START_S)
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=60)
    decisions = [json.loads(line) for line in output.splitlines()]
    assert [(each["before"], each["after"]) for each in decisions[:2]] == [(1, 2), (2, 1)]
    assert process.returncode == 0
