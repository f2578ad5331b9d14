"""Makes a layer's router: 32 directions of the MLP's input, found by spherical k-means on calibration tokens.

Routing is then by content: a token goes to the experts whose direction it is nearest to. Random directions would
route too, but neighbouring tokens would share nothing and an expert could not specialise. Shapes: N tokens,
D hidden, E experts, K experts per token.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize


def fit_router(
    x_ND: Tensor,
    is_code_N: Tensor,
    *,
    num_experts: int,
    experts_per_token: int,
    scale: float,
    num_rounds: int,
    seed: int,
) -> Tensor:
    """Return the router's weight, fp32 [E, D], its rows sorted from prose's experts to code's.

    Args:
        x_ND: the MLP's input on calibration tokens, fp32.
        is_code_N: bool; which of them are code.
        scale: length of every row. Small, so that all sigmoid scores are near one half and the renormalised
            weights of the chosen experts near 1 / K.
        num_rounds: of k-means.
        seed: of its starting points.
    """
    router_ED = scale * spherical_kmeans(x_ND, num_clusters=num_experts, num_rounds=num_rounds, seed=seed)
    chosen_NE = choose_experts(x_ND, router_ED, experts_per_token)
    code_share_E = chosen_NE[is_code_N].mean(0) if is_code_N.any() else torch.zeros(num_experts)
    prose_share_E = chosen_NE[~is_code_N].mean(0) if not is_code_N.all() else torch.zeros(num_experts)
    return router_ED[(code_share_E - prose_share_E).argsort(stable=True)]


def choose_experts(x_ND: Tensor, router_ED: Tensor, experts_per_token: int) -> Tensor:
    """Return fp32 [N, E]: 1 where the token uses the expert, K ones per row."""
    scores_NE = (x_ND @ router_ED.T).sigmoid()
    return torch.zeros_like(scores_NE).scatter_(1, scores_NE.topk(experts_per_token, dim=1).indices, 1.0)


def spherical_kmeans(x_ND: Tensor, *, num_clusters: int, num_rounds: int, seed: int) -> Tensor:
    """Cluster rows by direction; return unit centroids, fp32 [num_clusters, D]. A cluster left empty is reseeded."""
    generator = torch.Generator().manual_seed(seed)
    unit_ND = normalize(x_ND, dim=1)
    centroids_CD = spread_rows(unit_ND, num_clusters, generator)
    for _ in range(num_rounds):
        nearest_N = (unit_ND @ centroids_CD.T).argmax(1)
        sums_CD = torch.zeros_like(centroids_CD).index_add_(0, nearest_N, unit_ND)
        is_empty_C = nearest_N.bincount(minlength=num_clusters) == 0
        spare_N = torch.randint(len(unit_ND), (int(is_empty_C.sum()),), generator=generator)
        sums_CD[is_empty_C] = unit_ND[spare_N]
        centroids_CD = normalize(sums_CD, dim=1)
    return centroids_CD


def spread_rows(unit_ND: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Pick `count` rows far from each other, as k-means++ does with cosine distance; equal ones if need be."""
    chosen = [unit_ND[torch.randint(len(unit_ND), (1,), generator=generator)][0]]
    distance_N = torch.full((len(unit_ND),), torch.inf)
    for _ in range(count - 1):
        distance_N = torch.minimum(distance_N, 1 - unit_ND @ chosen[-1]).clamp_min(1e-9)
        chosen.append(unit_ND[distance_N.multinomial(1, generator=generator)][0])
    return torch.stack(chosen)
