"""The router: by content, deterministic, and numbered from prose to code."""

import torch

from moe.demo_model.routing import choose_experts, fit_router, spherical_kmeans
from tests.moe.demo_model.tiny import HIDDEN, calibration_inputs


def fit(seed: int = 0) -> torch.Tensor:
    x, is_code = calibration_inputs()
    return fit_router(
        x, is_code, num_experts=6, experts_per_token=2, scale=0.1, num_rounds=5, seed=seed
    )  # fmt: skip


def test_router_rows_are_deterministic_and_seeded() -> None:
    assert torch.equal(fit(seed=3), fit(seed=3))
    assert not torch.equal(fit(seed=3), fit(seed=4))


def test_router_rows_are_distinct_and_all_as_long_as_asked() -> None:
    router = fit()
    assert router.shape == (6, HIDDEN)
    torch.testing.assert_close(router.norm(dim=1), torch.full((6,), 0.1))
    assert len(torch.unique(router, dim=0)) == 6


def test_experts_are_numbered_from_prose_to_code() -> None:
    x, is_code = calibration_inputs()
    chosen = choose_experts(x, fit(), experts_per_token=2)
    affinity = chosen[is_code].mean(0) - chosen[~is_code].mean(0)
    assert affinity.tolist() == sorted(affinity.tolist())
    assert affinity[0] < -0.1 and affinity[-1] > 0.1


def test_every_token_chooses_k_experts() -> None:
    x, _ = calibration_inputs()
    chosen = choose_experts(x, fit(), experts_per_token=2)
    assert set(chosen.unique().tolist()) == {0.0, 1.0}
    assert torch.equal(chosen.sum(1), torch.full((len(x),), 2.0))


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
