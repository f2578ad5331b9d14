"""DeepSeek EPLB's function: its own example, its shapes, arrays and tensors, and never worse than the original."""

import numpy as np
import pytest
import torch

from expert_placement import rebalance_experts
from tests.support.placement.peers import eplb_global, eplb_hierarchical, even_imbalance

EXAMPLE = np.array(  # from EPLB's README
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
THEIRS = np.array(  # output printed in EPLB's README
    [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
)


def check_maps(phy2log: np.ndarray, log2phy: np.ndarray, logcnt: np.ndarray, experts: int) -> None:
    for layer, row in enumerate(phy2log):
        assert logcnt[layer].tolist() == np.bincount(row, minlength=experts).tolist()
        for expert in range(experts):
            own = log2phy[layer, expert]
            assert own[own >= 0].tolist() == np.flatnonzero(row == expert).tolist()
            assert (own[logcnt[layer, expert] :] == -1).all()
    assert log2phy.shape[2] == logcnt.max()


def test_the_example_of_eplb_is_planned_no_worse_than_there() -> None:
    phy2log, log2phy, logcnt = rebalance_experts(EXAMPLE, 16, 4, 2, 8)
    assert phy2log.shape == (2, 16) and phy2log.dtype == log2phy.dtype == logcnt.dtype == np.int64
    check_maps(phy2log, log2phy, logcnt, 12)
    assert (even_imbalance(EXAMPLE, phy2log, 8) <= even_imbalance(EXAMPLE, THEIRS, 8) + 1e-9).all()


def test_our_description_of_eplb_prints_its_readmes_example() -> None:
    ours = eplb_hierarchical(EXAMPLE, 16, 4, 2, 8)
    assert even_imbalance(EXAMPLE, ours, 8) == pytest.approx(even_imbalance(EXAMPLE, THEIRS, 8))


@pytest.mark.parametrize("seed", range(4))
def test_the_global_policy_is_no_worse_than_eplbs(seed: int) -> None:
    load = np.exp(np.random.default_rng(seed).normal(0, 0.8, (3, 32)))
    phy2log, log2phy, logcnt = rebalance_experts(load, 40, 1, 3, 8)
    check_maps(phy2log, log2phy, logcnt, 32)
    assert (
        even_imbalance(load, phy2log, 8) <= even_imbalance(load, eplb_global(load, 40, 8), 8) + 1e-9
    ).all()


def test_groups_keep_a_copy_on_one_node_each() -> None:
    load = np.exp(np.random.default_rng(9).normal(0, 0.8, (2, 32)))
    phy2log, _, _ = rebalance_experts(load, 40, 4, 2, 8)
    for row in phy2log:
        nodes = row.reshape(2, 20)
        whole = [[set(range(g * 8, g * 8 + 8)) <= set(node.tolist()) for node in nodes] for g in range(4)]
        assert all(any(own) for own in whole)


def test_tensors_in_give_tensors_out() -> None:
    weight = torch.from_numpy(EXAMPLE).float().requires_grad_()
    maps = rebalance_experts(weight, 16, 4, 2, 8)
    assert all(isinstance(own, torch.Tensor) and own.dtype == torch.int64 for own in maps)
    arrays = rebalance_experts(EXAMPLE, 16, 4, 2, 8)
    assert all(np.array_equal(own.numpy(), array) for own, array in zip(maps, arrays, strict=True))


@pytest.mark.parametrize(("replicas", "gpus"), [(8, 1), (12, 1), (24, 2), (8, 8), (64, 8)])
def test_every_size_that_eplb_takes_is_taken(replicas: int, gpus: int) -> None:
    load = np.exp(np.random.default_rng(1).normal(0, 0.8, (2, 8)))
    phy2log, log2phy, logcnt = rebalance_experts(load, replicas, 1, 1, gpus)
    assert phy2log.shape == (2, replicas)
    check_maps(phy2log, log2phy, logcnt, 8)


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"num_replicas is 17; it must be a multiple of num_gpus \(8\)"):
        rebalance_experts(EXAMPLE, 17, 4, 2, 8)
    with pytest.raises(ValueError, match="at least the 12 experts"):
        rebalance_experts(EXAMPLE, 8, 4, 2, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(12,\)"):
        rebalance_experts(EXAMPLE[0], 16, 4, 2, 8)
