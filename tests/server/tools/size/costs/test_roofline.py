"""The step times of `server.tools.size.costs.roofline`, on costs that are written in this file."""

import subprocess
import sys

import pytest

from server.tools.size.costs.device_table import DEVICES
from server.tools.size.costs.model_costs import LayerCosts, Layers, ModelCosts
from server.tools.size.costs.roofline import GPU_SHARES, WIDEEP, Roofline, _crossings
from server.tools.size.costs.step_times import RankRows
from tests.support.service.real_service import REPOSITORY

_LAYER = LayerCosts(
    own_weights=200_000_000, own_bytes=400_000_000, own_features=100_000, num_experts=64, top_k=4,
    expert_weights=10_000_000, expert_bytes=20_000_000, expert_features=10_000, attended_flops=16_384,
    prefill_flops=16_384, cached_numbers=2048, kv_heads=8, index_numbers=0, reach=0, state_bytes=0,
)  # fmt: skip
_H100 = DEVICES["h100"]
_DECODE = RankRows(0, 32, 32 * 2000, 0)


def _costs(**changed: int) -> ModelCosts:
    return ModelCosts(
        name="made_up", hidden_dim=4096, layers=(Layers(10, _LAYER._replace(**changed)),), own_kind="bfloat16",
        expert_kind="bfloat16", head_weights=10_000_000, head_bytes=20_000_000, shared_bytes=4_100_000_000,
    )  # fmt: skip


def _times(costs: ModelCosts | None = None, *, slots: int = 64, reducing: int = 1) -> Roofline:
    return Roofline(costs or _costs(), _H100, WIDEEP, slots_per_rank=slots, reducing=reducing)


def test_step_times_need_no_torch() -> None:
    """Simulators and the front use them."""
    code = "import sys, server.tools.size.costs.roofline, server.tools.size.costs.estimate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPOSITORY)


def test_one_rank_reads_its_weights_and_context_once_a_step() -> None:
    """A step of one row is limited by bytes, which are counted by hand."""
    step = _times().step([RankRows(0, 1, 3000, 0)], 1.0)
    memory = _H100.memory_bytes_per_s * GPU_SHARES.memory
    features = 2 * 2 * _LAYER.own_features / memory
    own = (_LAYER.own_bytes + 3000 * 2048 * 2) / memory + features + GPU_SHARES.layer_s
    assert step.attention_s == pytest.approx(10 * own / GPU_SHARES.whole)
    assert step.dispatch_s == 0
    assert step.waiting_s == (0.0,)
    assert step.total_s == pytest.approx(step.attention_s + step.experts_s + step.other_s)


def test_a_longer_context_more_rows_and_uneven_experts_take_longer() -> None:
    times = _times(slots=16)
    even = times.step([_DECODE] * 4, 1.0)
    assert times.step([_DECODE._replace(attended_tokens=32 * 8000)] * 4, 1.0).attention_s > even.attention_s
    assert times.step([RankRows(0, 512, 512 * 2000, 0)] * 4, 1.0).total_s > even.total_s
    uneven = times.step([_DECODE] * 4, 0.5)
    assert uneven.experts_s > even.experts_s and uneven.dispatch_s > even.dispatch_s


def test_ranks_wait_for_the_one_with_a_prompt() -> None:
    mixed = RankRows(4096, 32, 32 * 2000 + 4096 * 2048, 4096 * 2048)
    step = _times(slots=16).step([_DECODE, mixed, _DECODE, RankRows(0, 0, 0, 0)], 1.0)
    slowest = step.waiting_s.index(min(step.waiting_s))
    assert slowest == 1 and step.waiting_s[1] == 0
    assert step.waiting_s[3] > step.waiting_s[0] > 0.5 * step.attention_s


def test_a_rank_that_does_not_split_its_context_is_taken_to_read_alike_for_all_rows() -> None:
    times = _times()
    whole = times.step([RankRows(0, 32, 32 * 2000)], 1.0)
    assert whole == times.step([_DECODE], 1.0)
    prompts_only = times.step([RankRows(512, 0, 512 * 256)], 1.0)
    assert prompts_only == times.step([RankRows(512, 0, 512 * 256, 512 * 256)], 1.0)


def test_a_window_bounds_what_attention_reads() -> None:
    long = [RankRows(0, 32, 32 * 100_000, 0)]
    assert (
        _times(_costs(reach=128)).step(long, 1.0).attention_s
        == _times(_costs(reach=128)).step([RankRows(0, 32, 32 * 128, 0)], 1.0).attention_s
    )


def test_tensor_parallelism_reads_less_and_adds_up_parts() -> None:
    whole = _times().step([_DECODE], 1.0)
    cut = _times(_costs().cut(8), reducing=8).step([_DECODE], 1.0)
    assert cut.attention_s < whole.attention_s and cut.experts_s < whole.experts_s
    assert cut.dispatch_s > 0


def test_cutting_keeps_latents_whole_and_halves_kv_heads() -> None:
    latent = _costs(kv_heads=1).cut(2).layers[0].each
    heads = _costs().cut(2).layers[0].each
    assert (
        latent.cached_numbers == _LAYER.cached_numbers and heads.cached_numbers == _LAYER.cached_numbers // 2
    )


@pytest.mark.parametrize("sends", ["choice", "rank", "node"])
def test_rows_leave_a_domain_only_where_there_is_another(sends: str) -> None:
    inside, outside = _crossings(8, 8, 8, sends)  # type: ignore[arg-type]
    assert outside == 0 and 0 < inside <= 8
    inside, outside = _crossings(8, 32, 8, sends)  # type: ignore[arg-type]
    assert 0 < outside <= 8


def test_a_row_goes_to_fewer_nodes_than_ranks_and_to_fewer_ranks_than_it_has_choices() -> None:
    by_choice, by_rank, by_node = (_crossings(8, 32, 8, sends)[1] for sends in ("choice", "rank", "node"))  # type: ignore[arg-type]
    assert by_node < by_rank < by_choice == 8 * 0.75
