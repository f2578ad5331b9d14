"""Convert a dense SwiGLU MLP into a router, a shared expert and routed experts, without training.

The router has 32 directions of the MLP's input, found by spherical k-means on calibration tokens. A token goes to the
experts with the nearest directions. Random directions would route too, but similar tokens would share nothing,
so an expert could not specialise.

The neurons with the most energy on the calibration tokens go to the shared expert, unchanged. Every routed expert
takes from the rest those that its own tokens use, minus what the experts chosen with it already hold, so that the
K experts of a token complement each other. A scale per (expert, neuron), folded into the down projection, makes
their average reproduce the dense neuron. Rejected: splitting the neurons once among the experts (MoEfication).
With so few inactive neurons it cannot give both fluency and experts with different loads.

Shapes: N tokens, D hidden, I dense neurons, S shared neurons, R the rest, E experts, J neurons per expert,
K experts per token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

SMOOTHING = 0.02  # share of the average added to every token's energy, so that rare neurons keep a chance
PRIOR_TOKENS = 50  # average tokens that are added to every expert's own
RIDGE = 1e-3  # relative to the diagonal of the least-squares problem


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and constants of the conversion.

    Chosen by measurement: perplexity +4.7 % over the dense model on mixed text, loads that differ (hottest expert
    2.4 x the mean) and follow the topic.
    """

    num_experts: int = 32
    experts_per_token: int = 4
    shared_neurons: int = 1152
    expert_neurons: int = 144
    router_scale: float = 0.1
    kmeans_rounds: int = 12
    assignment_rounds: int = 3
    overlap_discount: float = 0.85  # for the share of a neuron's energy that co-chosen experts already hold
    seed: int = 0


class DenseMlp(NamedTuple):
    """down(silu(gate x) * up x), fp32."""

    gate: Tensor  # [I, D]
    up: Tensor  # [I, D]
    down: Tensor  # [D, I]

    def take(self, neurons: Tensor) -> "DenseMlp":
        """Return the MLP of these neurons only, in the given order."""
        return DenseMlp(self.gate[neurons], self.up[neurons], self.down[:, neurons])


class MoeMlp(NamedTuple):
    """A converted MLP."""

    router: Tensor  # [E, D]
    shared: DenseMlp
    experts: list[DenseMlp]


def convert_mlp(dense: DenseMlp, x_ND: Tensor, is_code_N: Tensor, recipe: Recipe) -> MoeMlp:
    """Convert one layer.

    Args:
        dense: Weights of the layer, fp32.
        x_ND: Input of the layer on calibration tokens, fp32.
        is_code_N: bool, True for tokens of code. Experts are sorted from prose to code.
    """
    router_ED = fit_router(
        x_ND,
        is_code_N,
        num_experts=recipe.num_experts,
        experts_per_token=recipe.experts_per_token,
        scale=recipe.router_scale,
        num_rounds=recipe.kmeans_rounds,
        seed=recipe.seed,
    )
    chosen_NE = choose_experts(x_ND, router_ED, recipe.experts_per_token)
    energy_NI = neuron_energy(dense, x_ND)
    shared_S, rest_R = split_neurons(energy_NI.mean(0), recipe.shared_neurons)
    pairs_EER = pair_energy(chosen_NE, energy_NI[:, rest_R])
    held_ER = assign_neurons(pairs_EER, recipe)
    scale_ER = fit_scales(pairs_EER, held_ER, recipe.experts_per_token)
    experts = []
    for held_R, scale_R in zip(held_ER, scale_ER, strict=True):
        expert = dense.take(rest_R[held_R])
        experts.append(expert._replace(down=expert.down * scale_R[held_R]))
    return MoeMlp(router=router_ED, shared=dense.take(shared_S), experts=experts)


def neuron_energy(dense: DenseMlp, x_ND: Tensor) -> Tensor:
    """Return fp32 [N, I]: the squared length of each neuron's contribution to each token's output."""
    activation_NI = silu(x_ND @ dense.gate.T) * (x_ND @ dense.up.T)
    energy_NI: Tensor = activation_NI.square() * dense.down.square().sum(0)
    return energy_NI


def split_neurons(energy_I: Tensor, num_shared: int) -> tuple[Tensor, Tensor]:
    """Return the ids of the `num_shared` neurons with the most energy, and of the rest; both ascending."""
    order = energy_I.argsort(descending=True, stable=True)
    return order[:num_shared].sort().values, order[num_shared:].sort().values


def pair_energy(chosen_NE: Tensor, energy_NR: Tensor) -> Tensor:
    """Return fp32 [E, E, R]: per neuron, the smoothed energy of the tokens that chose both experts."""
    energy_NR = energy_NR + SMOOTHING * energy_NR.mean(0)
    pairs = []
    for chosen_N in chosen_NE.T.bool():
        pairs.append(chosen_NE[chosen_N].T @ energy_NR[chosen_N])
    pairs_EER = torch.stack(pairs)
    prior_ER = SMOOTHING * energy_NR.mean(0) * (chosen_NE.sum(0)[:, None] + PRIOR_TOKENS)
    pairs_EER.diagonal().add_(prior_ER.T)  # the diagonal is a view [R, E]
    return pairs_EER


def assign_neurons(pairs_EER: Tensor, recipe: Recipe) -> Tensor:
    """Assign J neurons to every expert; return bool [E, R]. Greedy: each expert in turn, given the others' neurons."""
    num_experts, _, num_rest = pairs_EER.shape
    held_ER = torch.zeros(num_experts, num_rest)
    for _ in range(recipe.assignment_rounds):
        for expert in range(num_experts):
            held_ER[expert] = 0
            covered_R = (pairs_EER[expert] * held_ER).sum(0)
            gain_R = pairs_EER[expert, expert] - recipe.overlap_discount * covered_R
            best_J = gain_R.argsort(descending=True, stable=True)[: recipe.expert_neurons]
            held_ER[expert, best_J] = 1
    return held_ER.bool()


def fit_scales(pairs_EER: Tensor, held_ER: Tensor, experts_per_token: int) -> Tensor:
    """Return fp32 [E, R]: the factor by which an expert scales a neuron, in [0, K].

    Solves, per neuron, a least-squares problem over the experts that hold it: the average over a token's K experts,
    with 0 for those without the neuron, should equal the dense neuron.
    """
    held_RE = held_ER.T.float()
    gram_REE = pairs_EER.permute(2, 0, 1) / experts_per_token**2
    gram_REE = gram_REE * held_RE[:, :, None] * held_RE[:, None, :]
    target_RE = pairs_EER.diagonal() / experts_per_token * held_RE
    ridge_RE = (1 - held_RE) + RIDGE * gram_REE.diagonal(dim1=1, dim2=2) + 1e-9
    scale_RE: Tensor = torch.linalg.solve(gram_REE + torch.diag_embed(ridge_RE), target_RE[..., None])[..., 0]
    scale_ER: Tensor = scale_RE.clamp(0, experts_per_token).T.contiguous()
    return scale_ER


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
    """Return the router's weight, fp32 [E, D], with rows sorted from prose's experts to code's.

    Args:
        x_ND: Input of the MLP on calibration tokens, fp32.
        is_code_N: bool, True for tokens of code.
        scale: Length of every row. It is small, so that all sigmoid scores are near one half and the renormalised
            weights of the chosen experts near 1 / K.
        num_rounds: Rounds of k-means.
        seed: Seed of the starting points.
    """
    router_ED = scale * spherical_kmeans(x_ND, num_clusters=num_experts, num_rounds=num_rounds, seed=seed)
    chosen_NE = choose_experts(x_ND, router_ED, experts_per_token)
    code_share_E = chosen_NE[is_code_N].mean(0) if is_code_N.any() else torch.zeros(num_experts)
    prose_share_E = chosen_NE[~is_code_N].mean(0) if not is_code_N.all() else torch.zeros(num_experts)
    return router_ED[(code_share_E - prose_share_E).argsort(stable=True)]


def choose_experts(x_ND: Tensor, router_ED: Tensor, experts_per_token: int) -> Tensor:
    """Return fp32 [N, E]: 1 if the token uses the expert, K ones per row."""
    scores_NE = (x_ND @ router_ED.T).sigmoid()
    return torch.zeros_like(scores_NE).scatter_(1, scores_NE.topk(experts_per_token, dim=1).indices, 1.0)


def spherical_kmeans(x_ND: Tensor, *, num_clusters: int, num_rounds: int, seed: int) -> Tensor:
    """Cluster rows by direction; return unit centroids, fp32 [num_clusters, D]. Empty clusters are reseeded."""
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
    """Choose `count` rows far from each other, like k-means++ with cosine distance. Rows may repeat if they are few."""
    chosen = [unit_ND[torch.randint(len(unit_ND), (1,), generator=generator)][0]]
    distance_N = torch.full((len(unit_ND),), torch.inf)
    for _ in range(count - 1):
        distance_N = torch.minimum(distance_N, 1 - unit_ND @ chosen[-1]).clamp_min(1e-9)
        chosen.append(unit_ND[distance_N.multinomial(1, generator=generator)][0])
    return torch.stack(chosen)
