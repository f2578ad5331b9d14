"""The conversion of one MLP, on small seeded weights."""

import torch
from torch import Tensor
from torch.nn.functional import silu

from moe.demo_model.conversion import (
    DenseMlp,
    MoeMlp,
    assign_neurons,
    choose_experts,
    convert_mlp,
    fit_router,
    fit_scales,
    neuron_energy,
    pair_energy,
    spherical_kmeans,
)
from tests.moe.demo_model.tiny import EVERYTHING, HIDDEN, NEURONS, RECIPE, calibration_inputs, dense_mlp


def run_dense(mlp: DenseMlp, x: Tensor) -> Tensor:
    return (silu(x @ mlp.gate.T) * (x @ mlp.up.T)) @ mlp.down.T


def run_moe(mlp: MoeMlp, x: Tensor, experts_per_token: int) -> Tensor:
    """Compute Glm4Moe's arithmetic slowly, one token at a time. The oracle."""
    rows = []
    for token in x:
        scores = (token @ mlp.router.T).sigmoid()
        weights, ids = scores.topk(experts_per_token)
        weights = weights / weights.sum()
        routed = sum(w * run_dense(mlp.experts[e], token) for w, e in zip(weights, ids.tolist(), strict=True))
        rows.append(run_dense(mlp.shared, token) + routed)
    return torch.stack(rows)


def converted() -> tuple[DenseMlp, MoeMlp]:
    return dense_mlp(), convert_mlp(dense_mlp(), *calibration_inputs(), RECIPE)


def rows_of(part: Tensor, whole: Tensor) -> list[int]:
    """Return which row of `whole` each row of `part` equals exactly."""
    is_equal = (part[:, None] == whole[None]).all(-1)
    assert is_equal.sum(1).eq(1).all(), "a row is not exactly one of the dense rows"
    return is_equal.int().argmax(1).tolist()


def test_shared_neurons_are_kept_exactly() -> None:
    dense, moe = converted()
    neurons = rows_of(moe.shared.gate, dense.gate)
    assert len(set(neurons)) == RECIPE.shared_neurons
    assert torch.equal(moe.shared.up, dense.up[neurons])
    assert torch.equal(moe.shared.down, dense.down[:, neurons])


def test_routed_experts_hold_dense_neurons_that_are_not_shared_with_down_scaled() -> None:
    dense, moe = converted()
    shared = set(rows_of(moe.shared.gate, dense.gate))
    for expert in moe.experts:
        neurons = rows_of(expert.gate, dense.gate)
        assert len(set(neurons)) == RECIPE.expert_neurons
        assert not shared & set(neurons)
        assert torch.equal(expert.up, dense.up[neurons])
        scale = expert.down[0] / dense.down[0, neurons]
        torch.testing.assert_close(expert.down, dense.down[:, neurons] * scale)
        assert (scale >= 0).all() and (scale <= RECIPE.experts_per_token + 1e-5).all()


def test_conversion_is_deterministic() -> None:
    (_, first), (_, second) = converted(), converted()
    assert torch.equal(first.router, second.router)
    for one, other in zip([first.shared, *first.experts], [second.shared, *second.experts], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_with_all_experts_chosen_and_all_neurons_in_each_the_moe_is_the_dense_mlp() -> None:
    """Up to the ridge and the smoothing of the scales, which are then one number near 1 per neuron."""
    dense, (x, is_code) = dense_mlp(), calibration_inputs()
    moe = convert_mlp(dense, x, is_code, EVERYTHING)
    for expert in moe.experts:
        scale = expert.down / dense.down[:, rows_of(expert.gate, dense.gate)]
        assert scale.min() > 0.97 and scale.max() < 1.03
    expected = run_dense(dense, x)
    difference = run_moe(moe, x, experts_per_token=4) - expected
    assert difference.norm() / expected.norm() < 0.03


def test_conversion_beats_leaving_the_routed_neurons_out() -> None:
    dense, (x, is_code) = dense_mlp(), calibration_inputs()
    moe = convert_mlp(dense, x, is_code, RECIPE)
    expected = run_dense(dense, x)
    error = (run_moe(moe, x, RECIPE.experts_per_token) - expected).square().sum()
    error_without = (run_dense(moe.shared, x) - expected).square().sum()
    assert error < 0.5 * error_without


def test_neuron_energy_is_the_squared_length_of_what_a_neuron_adds() -> None:
    dense = DenseMlp(*(weight.double() for weight in dense_mlp()))  # fp32 would need a tolerance for rounding
    x = calibration_inputs(num_tokens=5)[0].double()
    energy = neuron_energy(dense, x)
    for neuron in range(NEURONS):
        added = run_dense(dense.take(torch.tensor([neuron])), x)
        torch.testing.assert_close(energy[:, neuron], added.square().sum(1))


def test_pair_energy_sums_over_the_tokens_that_chose_both() -> None:
    generator = torch.Generator().manual_seed(0)
    router = torch.randn(6, HIDDEN, generator=generator)
    x, _ = calibration_inputs(num_tokens=40)
    chosen = choose_experts(x, router, 2)
    energy = torch.rand(40, 7, generator=generator)
    pairs = pair_energy(chosen, energy)
    smooth = energy + 0.02 * energy.mean(0)
    for one in range(6):
        for other in range(6):
            both = (chosen[:, one] * chosen[:, other]).bool()
            prior = 0.02 * smooth.mean(0) * (both.sum() + 50) if one == other else 0.0
            torch.testing.assert_close(pairs[one, other], smooth[both].sum(0) + prior)


def test_an_expert_leaves_alone_what_its_partner_holds() -> None:
    """Two experts are always chosen together, and two neurons have nearly equal use: each expert takes one."""
    pairs = torch.tensor([[1.0, 0.9]]).expand(2, 2, 2)
    recipe = RECIPE.__class__(num_experts=2, experts_per_token=2, expert_neurons=1)
    assert assign_neurons(pairs, recipe).tolist() == [[True, False], [False, True]] or (
        assign_neurons(pairs, recipe).tolist() == [[False, True], [True, False]]
    )


def test_a_neuron_that_one_of_two_experts_holds_is_doubled() -> None:
    pairs = torch.ones(2, 2, 2)
    scales = fit_scales(pairs, torch.tensor([[True, False], [False, True]]), 2)
    torch.testing.assert_close(scales, torch.tensor([[2.0, 0.0], [0.0, 2.0]]), rtol=2e-3, atol=0)


def fit(seed: int = 0) -> torch.Tensor:
    x, is_code = calibration_inputs()
    return fit_router(
        x, is_code, num_experts=6, experts_per_token=2, scale=0.1, num_rounds=5, seed=seed
    )  # fmt: skip


def test_router_rows_are_distinct_and_all_as_long_as_asked() -> None:
    router = fit()
    assert router.shape == (6, HIDDEN)
    torch.testing.assert_close(router.norm(dim=1), torch.full((6,), 0.1))
    assert len(torch.unique(router, dim=0)) == 6


def test_clusters_far_apart_are_found() -> None:
    corners = torch.eye(HIDDEN)[:4].repeat_interleave(20, dim=0)
    generator = torch.Generator().manual_seed(0)
    x = corners + 0.01 * torch.randn(80, HIDDEN, generator=generator)
    centroids = spherical_kmeans(x, num_clusters=4, num_rounds=5, seed=0)
    nearest = (x @ centroids.T).argmax(1).view(4, 20)
    assert torch.equal(nearest, nearest[:, :1].expand(4, 20))
    assert len(nearest[:, 0].unique()) == 4


def test_more_clusters_than_distinct_tokens_still_gives_unit_rows() -> None:
    x = torch.eye(HIDDEN)[:2].repeat(10, 1)
    centroids = spherical_kmeans(x, num_clusters=4, num_rounds=3, seed=0)
    torch.testing.assert_close(centroids.norm(dim=1), torch.ones(4))


def test_calibration_of_one_topic_only_still_gives_a_router() -> None:
    x, is_code = calibration_inputs()
    for mask in (torch.zeros_like(is_code), torch.ones_like(is_code)):
        router = fit_router(x, mask, num_experts=6, experts_per_token=2, scale=0.1, num_rounds=2, seed=0)
        assert router.isfinite().all()
