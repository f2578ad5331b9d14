"""DeepSeek EPLB's function on top of WideEP's planner, for programs that call `eplb.rebalance_experts`.

Signature, shapes and meaning are those of github.com/deepseek-ai/EPLB. Like its callers, it assumes that the copies of
an expert share evenly. If groups divide by nodes, every expert has a copy on its group's node. In contrast to DeepSeek's
function, further copies may leave the node, and a GPU gets two copies of an expert only if there are too many slots to
avoid it.
"""

import sys
from typing import Any

import numpy as np

from expert_placement.nodes import Cluster, Rules, group_homes
from expert_placement.plan import plan


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Place and copy experts by their load.

    Args:
        weight: [layers, num_logical_experts], the load of each expert; a numpy array or a torch tensor.
        num_replicas: Physical experts of a layer, a multiple of `num_gpus`.
        num_groups: Number of expert groups; pinned to nodes if `num_nodes` divides it.
        num_nodes: Number of nodes, a divisor of `num_gpus`.
        num_gpus: Number of GPUs.

    Returns:
        physical_to_logical_map [layers, num_replicas], the expert of each physical one;
        logical_to_physical_map [layers, num_logical_experts, most copies], padded with -1;
        expert_count [layers, num_logical_experts], the copies of each. int64, of weight's kind; tensors on the CPU.

    Raises:
        ValueError: Sizes do not divide, there are fewer replicas than experts, or the weight is not a load.
    """
    is_tensor = hasattr(weight, "detach")
    load = np.asarray(weight.detach().cpu().double().numpy() if is_tensor else weight, dtype=np.float64)
    phy2log = _physical_to_logical(load, num_replicas, num_groups, num_nodes, num_gpus)
    log2phy, logcnt = _invert(phy2log, load.shape[1])
    if not is_tensor:
        return phy2log, log2phy, logcnt
    torch = sys.modules["torch"]  # the caller passed a tensor, so torch is imported
    return torch.from_numpy(phy2log), torch.from_numpy(log2phy), torch.from_numpy(logcnt)


def _physical_to_logical(
    load: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> np.ndarray:
    if load.ndim != 2:
        raise ValueError(f"weight has shape {load.shape}; it must be [layers, num_logical_experts]")
    experts = load.shape[1]
    if num_gpus < 1 or num_replicas % num_gpus or num_replicas < experts:
        raise ValueError(
            f"num_replicas is {num_replicas}; it must be a multiple of num_gpus ({num_gpus}) and at least the "
            f"{experts} experts"
        )
    nodes = num_nodes if num_groups % num_nodes == 0 else 1  # DeepSeek's rule for when groups are pinned
    cluster = Cluster(num_ranks=num_gpus, num_nodes=nodes)
    home = group_homes(load, num_groups, nodes) if nodes > 1 else None
    per_gpu = num_replicas // num_gpus
    rules = Rules(cluster=cluster, home=home, even=True)
    held = plan(load, min(per_gpu, experts), rules).placement.slot_expert
    extra = per_gpu - min(per_gpu, experts)
    blocks = held.reshape(len(load), num_gpus, -1)
    if extra:  # every GPU already has every expert; the remaining slots repeat those with the highest load
        hottest = np.argsort(-load, axis=1, kind="stable")[:, np.arange(extra) % experts]
        blocks = np.concatenate((blocks, np.repeat(hottest[:, None], num_gpus, axis=1)), axis=2)
    return np.array(blocks.reshape(len(load), num_replicas))  # writable, because the caller may change it


def _invert(phy2log: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    logcnt = np.stack([np.bincount(row, minlength=experts) for row in phy2log])
    log2phy = np.full((*logcnt.shape, int(logcnt.max())), -1, dtype=np.int64)
    for layer, row in enumerate(phy2log):
        order = np.argsort(row, kind="stable")
        first = np.cumsum(logcnt[layer]) - logcnt[layer]
        copy = np.arange(len(row)) - np.repeat(first, logcnt[layer])
        log2phy[layer, row[order], copy] = order
    return log2phy, logcnt.astype(np.int64)
