"""Services that have new weights or adapters grow and shrink: new ranks serve them too, and no answer changes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.server.faults.test_faults import bodies
from tests.server.sizes.test_resizes import check_serves, scale, wait_for_engine
from tests.server.test_adapters import MODULES
from tests.server.test_weight_updates import call, update
from tests.support.models.adapters import FUSED, write_adapter
from tests.support.models.families import write_checkpoint
from tests.support.requests.timed_streams import stream_all
from tests.support.service.real_service import RealService, write_tiny_model
from tests.support.service.service_processes import wait_until

pytestmark = pytest.mark.slow


def said(service: RealService, asked: list[dict[str, Any]]) -> list[Any]:
    return [each.said for each in stream_all(service.url, asked)]


def check_resizes(service: RealService, asked: list[dict[str, Any]]) -> None:
    """Grow, lose the new rank, and shrink; the answers stay the same."""
    expected = said(service, asked)
    assert scale(service, 3).status_code == 200, service.output()
    check_serves(service, 3)
    assert said(service, asked) == expected
    killed = service.engines()[2]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: service.status()["losses"] == 1, service.output)
    check_serves(service, 3)
    assert service.engines()[2] != killed
    assert said(service, asked) == expected
    assert scale(service, 1).status_code == 200, service.output()
    check_serves(service, 1)
    assert said(service, asked) == expected


def test_new_ranks_serve_the_newest_weights(tmp_path: Path) -> None:
    models = [write_tiny_model(tmp_path / f"tiny{seed}") for seed in range(2)]
    for seed, directory in enumerate(models):
        write_checkpoint("qwen3_moe", directory, seed=seed, vocab_size=320)
    flags = ("-dp=2", "--max-rank-restarts=20", "--served-model-name=tiny")
    with RealService.serve(models[0], tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        before = said(service, bodies())
        update(service, models[1])
        assert said(service, bodies()) != before
        check_resizes(service, bodies())
        assert call(service, "/weight_checker")["success"] is True
        update(service, models[0])
        assert said(service, bodies()) == before
        assert scale(service, 2, wait=False).status_code == 202
        wait_for_engine(service, 1)
        refused = service.post("/start_weight_update", json={})
        assert refused.status_code == 409 and "resizes the service" in refused.text


def test_new_ranks_serve_the_adapters(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    write_adapter(
        tmp_path / "one", AutoModelForCausalLM.from_pretrained(model), modules=MODULES, experts=FUSED, seed=1
    )
    flags = ("-dp=2", "--max-rank-restarts=20", "--enable-lora", "--lora-modules", f"one={tmp_path / 'one'}")
    with RealService.serve(model, tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        of_base = [{**body, "model": "tiny"} for body in bodies()]
        of_adapter = [{**body, "model": "one"} for body in of_base]
        assert said(service, of_base) != said(service, of_adapter)
        check_resizes(service, [*of_base, *of_adapter])
