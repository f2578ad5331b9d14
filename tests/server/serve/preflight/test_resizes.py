"""Sizes that a service cannot have: each with the numbers that explain it."""

from dataclasses import replace

import pytest

from server.options.table import Options
from server.serve.preflight.resizes import why_no_resizes, why_not_resized
from tests.support.service.real_service import write_tiny_model

pytestmark = pytest.mark.slow  # writing the model imports torch

GIB = 1 << 30


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Options:
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return Options(model=str(model), device="cpu").with_engine(kv_cache_bytes=16 << 20)


def test_a_size_that_fits_has_no_reason(options: Options) -> None:
    for wanted in (1, 3, 4):
        assert why_not_resized(options, 2, wanted, free_bytes=8 * GIB, cores=2) is None


def test_each_rank_needs_an_expert(options: Options) -> None:
    reason = why_not_resized(options, 2, 999, free_bytes=8 * GIB, cores=999)
    assert reason is not None and "experts in a layer, and each rank needs one" in reason


def test_cores_limit_growth_only(options: Options) -> None:
    reason = why_not_resized(options, 2, 5, free_bytes=8 * GIB, cores=1)
    assert reason == "this machine has 1 cores, which are enough for 4 ranks"
    assert why_not_resized(options, 6, 5, free_bytes=8 * GIB, cores=1) is None


def test_memory_limits_both_ways_and_the_numbers_are_given(options: Options) -> None:
    reason = why_not_resized(options, 2, 4, free_bytes=GIB // 2, cores=2)
    assert reason is not None and reason.startswith("2 more ranks take 0.6") and "0.50 GiB are free" in reason
    reason = why_not_resized(options, 4, 2, free_bytes=0, cores=2)
    assert reason is not None and reason.startswith("the experts of 2 ranks take 0.00 GiB")


def test_redundant_experts_and_nodes_limit_the_size(options: Options) -> None:
    redundant = options.with_engine(eplb_config=replace(options.engine.eplb_config, num_redundant_experts=20))
    reason = why_not_resized(redundant, 4, 2, free_bytes=8 * GIB, cores=2)
    assert reason is not None and reason.startswith("num_redundant_experts is 20")
    reason = why_not_resized(options.with_engine(dispatch_node_size=2), 4, 3, free_bytes=8 * GIB, cores=2)
    assert reason is not None and "does not divide 3 ranks" in reason


def test_services_with_pools_or_gpus_are_not_resized(options: Options) -> None:
    assert why_no_resizes(options) is None
    assert "pools of fixed sizes" in (why_no_resizes(replace(options, pools="prefill:1,decode:1")) or "")
    for own in ({"pool": "decode"}, {"role": "decode"}):
        assert "(--pool)" in (why_no_resizes(replace(options, **own)) or "")
    assert "not implemented on GPUs" in (why_no_resizes(replace(options, device="cuda")) or "")
