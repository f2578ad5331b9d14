"""Whole models of a day: their shapes match the published ones, and the contents of their rows."""

import pytest

from benchmarks.gpu.ranks.models import config_of
from benchmarks.gpu.ranks.throughput import _compared, units
from benchmarks.gpu.results import Setting
from benchmarks.serving.closed_loop import Latency
from moe.families import build_on_meta

REAL = Setting(device="cuda", is_tiny=False)
LATENCY = Latency(tokens_per_s=50.0, ttft_p50_ms=1.0, ttft_p99_ms=2.0, itl_p50_ms=3.0, itl_p99_ms=4.0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3", 30.53), ("gpt-oss", 20.91)],  # of the published checkpoints
)
def test_models_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    model = build_on_meta(config_of(name, REAL))
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_cut_deepseek_has_whole_layers() -> None:
    """One dense layer, and three with 256 experts and a shared one, as in V3's config.json."""
    count = sum(weight.numel() for weight in build_on_meta(config_of("deepseek", REAL)).parameters())
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168
    assert count == pytest.approx(
        4 * attention + 3 * experts + 3 * 7168 * 18432 + 2 * 129280 * 7168, rel=1e-4
    )


def test_a_peer_is_held_against_our_rate_with_as_many_clients() -> None:
    known = {
        "throughput/qwen3 wideep/qwen3 32 clients, wideep/tokens/s": 400.0,
        "throughput/qwen3 wideep/qwen3 1 clients, wideep/tokens/s": 90.0,
    }
    setting = Setting(device="cuda", is_tiny=False, known=known)
    row = _compared(setting, "qwen3", "continuous", 32, LATENCY)
    assert (row.figures["tokens/s"], row.figures["wideep x"]) == (50.0, 8.0)
    assert row.goals == {"wideep x": 5.0}
    assert row.missed() == []
    assert _compared(setting, "qwen3", "continuous", 1, LATENCY).goals == {}
    static = _compared(setting, "qwen3", "static", 32, 100.0)
    assert (static.figures["wideep x"], static.figures["ITL p50 ms"]) == (4.0, None)
    assert _compared(REAL, "qwen3", "continuous", 32, LATENCY).figures["wideep x"] is None


def test_our_engine_runs_before_the_peers_that_are_held_against_it() -> None:
    order = units(REAL)
    for name in ("qwen3", "gpt-oss"):
        first = order.index(f"{name} wideep")
        assert first < order.index(f"{name} continuous") < order.index(f"{name} static")
    assert order.index("deepseek wideep") < order.index("deepseek static")
    assert "deepseek continuous" not in order, "transformers does not support it"
