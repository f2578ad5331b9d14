"""The time of a step from its bounds: attention, experts, dispatch and imbalance, from a model's costs and a device. No torch.

Every part takes the longer of its memory reads and its multiplications (a roofline: Williams et al., 2009), at the shares
of the nominal rates that published kernels achieve. One small set of shares applies to all models, GPUs and engines; each
has its source below. One of them, `whole`, was fitted to two published traces; `wideep size --published` prints how well
the other figures are predicted.

Not modelled: the network's topology beyond one domain of fast links, contention of messages, steps that wait for the host,
prefix hits, and other programs on the machine.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from server.tools.size.costs.device_table import Device
from server.tools.size.costs.model_costs import LayerCosts, ModelCosts
from server.tools.size.costs.step_times import RankRows, StepCost

Sends = Literal["choice", "rank", "node"]


class RateShares(NamedTuple):
    """Shares of nominal rates that kernels achieve, and fixed costs of a step. The same for all GPUs."""

    # DeepGEMM's README, 64 rows on H800 (3,350 GB/s): 1,688 to 2,668 GB/s; FlashMLA's: 3,000 GB/s.
    memory: float = 0.8
    # DeepGEMM's README: at most 1,550 TFLOPS of H800's 1,979; less for most shapes.
    products: float = 0.7
    # FlashMLA's README: 660 TFLOPS of H800's 989 in decodes; 1,460 of B200's 2,250 in prompts.
    attention: float = 0.65
    # DeepEP's README: 153 to 158 GB/s of H800's 200; TensorRT-LLM's blog 18: about 80 % of GB200's 900.
    link: float = 0.8
    # DeepEP's README: 43 GB/s through a card of 50, EP16.
    network: float = 0.86
    # TensorRT-LLM's blog 18: 19 and 31 us for one token among 8 GPUs.
    link_latency_s: float = 20e-6
    # DeepEP's README, 128 tokens among 128 GPUs: 192 us, of which 174 at 43 GB/s; the sending side takes as long again.
    network_latency_s: float = 40e-6
    # Mean padding rows per group of an expert: half of the 64 rows that grouped kernels process at once.
    padding_rows: float = 32.0
    # Passes over the inputs and outputs of a product: the product's own, and one by a kernel before or after it (norm,
    # quantisation, rotation, activation, permutation).
    passes: float = 2.0
    # About 20 kernels of a layer in a CUDA graph, 2 us from one to the next.
    layer_s: float = 40e-6
    # The share that remains of all these when kernels run together: tails, gaps, processors used for messages. DeepSeek's
    # two published traces (H800, even routing) take 1.31 and 1.35 times the sum of the shares above; no other figure was used.
    whole: float = 0.75
    # The host's part of a step: scheduling, sampling, launching a graph.
    step_s: float = 1e-3


GPU_SHARES = RateShares()
# Measured rates are achieved rates; numpy's are close to our kernels'. A layer is a call into compiled code.
MEASURED_SHARES = RateShares(
    memory=1.0, products=1.0, attention=0.5, link=1.0, network=1.0, padding_rows=4.0, layer_s=20e-6, whole=1.0
)
# Of a GPU's measured copy and product: an H200 copies at 4.21 of its 4.8 TB/s and multiplies at 800 of its 989 TFLOPS.
MEASURED_GPU_SHARES = GPU_SHARES._replace(
    memory=GPU_SHARES.memory / 0.877, products=GPU_SHARES.products / 0.81
)
# One Zen 3 core reads 20 GB/s and multiplies 84 GFLOPS of 109 (docs/LOG.md).
CPU_SHARES = MEASURED_SHARES._replace(memory=0.8, products=0.75, network=0.8)


class EngineTraits(NamedTuple):
    """Properties of an engine that affect the time of a step."""

    name: str
    # Whether quantised weights are multiplied directly, instead of as bfloat16.
    multiplies_codes: bool
    overlaps: bool  # one half of the rows is computed while the other one is sent
    row_bytes: float  # per number of a row sent to experts
    answer_bytes: float  # per number of an answer
    kv_bytes: float  # per cached number
    sends: Sends  # copies of a row: one per choice, or one per rank or node with a choice
    returns: Sends  # the same for answers


WIDEEP = EngineTraits("WideEP", False, False, 2, 2, 2, "rank", "choice")
WIDEEP_CPU = EngineTraits("WideEP on CPU", False, False, 4, 4, 4, "rank", "choice")


def shares_of(device: Device) -> RateShares:
    """Return the achieved shares of a device's rates."""
    if not device.is_cpu:
        return MEASURED_GPU_SHARES if device.is_measured else GPU_SHARES
    return MEASURED_SHARES if device.is_measured else CPU_SHARES


class _Rows(NamedTuple):
    """The rows of each of R ranks, as arrays."""

    rows_R: np.ndarray
    decode_attended_R: np.ndarray
    prefill_attended_R: np.ndarray
    decodes_R: np.ndarray

    def times(self, share: float) -> "_Rows":
        return _Rows(*(each * share for each in self))


class _Parts(NamedTuple):
    own_R: np.ndarray
    experts_s: float  # of the fullest rank
    even_experts_s: float  # if all ranks had the same number of expert rows
    dispatch_s: float


class Roofline:
    """`StepTimes` of one model on one device with expert parallelism; with one rank, on a single device."""

    def __init__(
        self,
        costs: ModelCosts,
        device: Device,
        engine: EngineTraits,
        *,
        slots_per_rank: int,
        shares: RateShares | None = None,
        reducing: int = 1,
    ) -> None:
        """Compute the achieved rates.

        Args:
            costs: Costs of the model, or of one device's part with tensor parallelism.
            device: A rank's share of the device.
            slots_per_rank: Number of slots per layer.
            reducing: Number of devices that add partial results after attention and experts (tensor parallelism), or 1.
        """
        self._costs, self._device, self._engine = costs, device, engine
        self._slots, self._reducing = slots_per_rank, reducing
        self._shares = shares or shares_of(device)
        self._memory = device.memory_bytes_per_s * self._shares.memory
        self._own_rate = self._rate(costs.own_kind) * self._shares.products
        self._expert_rate = self._rate(costs.expert_kind) * self._shares.products
        narrow = "fp8" if engine.kv_bytes < 2 and engine.multiplies_codes else "bfloat16"
        self._attention_rate = device.rate_of(narrow) * self._shares.attention

    def step(self, ranks: Sequence[RankRows] | np.ndarray, balancedness: float) -> StepCost:
        rows = _arrays(ranks)
        whole = self._parts(rows, balancedness)
        computing_R = whole.own_R + whole.experts_s
        layers_s, dispatch_s = float(computing_R.max()) + whole.dispatch_s, whole.dispatch_s
        if self._engine.overlaps and len(ranks) > 1:
            half = self._parts(rows.times(0.5), balancedness)
            halves_s = float((half.own_R + half.experts_s).max())
            hidden_s = 2 * max(halves_s, half.dispatch_s)
            if hidden_s < layers_s:
                layers_s, whole = (
                    hidden_s,
                    half._replace(
                        own_R=2 * half.own_R,
                        experts_s=2 * half.experts_s,
                        even_experts_s=2 * half.even_experts_s,
                    ),
                )
                dispatch_s = hidden_s - 2 * halves_s
        other_s = self._other_s(float(rows.decodes_R.max()))
        uneven_s = whole.experts_s - whole.even_experts_s
        waiting = (whole.own_R.max() - whole.own_R + uneven_s).tolist()
        return StepCost(
            total_s=layers_s + other_s,
            attention_s=float(whole.own_R.max()),
            experts_s=whole.experts_s,
            dispatch_s=dispatch_s,
            other_s=other_s,
            waiting_s=tuple(waiting),
        )

    def _rate(self, kind: str) -> float:
        """Return operations per second on weights in this storage format."""
        if not self._engine.multiplies_codes:
            return self._device.rate_of("bfloat16")
        if kind in ("mxfp4", "nvfp4"):
            return self._device.rate_of("fp4" if "fp4" in self._device.rates else "bfloat16")
        return self._device.rate_of("fp8" if kind in ("fp8", "mxfp8", "int8") else "bfloat16")

    def _parts(self, rows: _Rows, balancedness: float) -> _Parts:
        own_R, experts_s, even_s, dispatch_s = np.zeros_like(rows.rows_R), 0.0, 0.0, 0.0
        for count, layer in self._costs.layers:
            own_R = own_R + count * self._own_s(layer, rows)
            if self._reducing > 1:
                dispatch_s += count * self._reduce_s(rows)
            if layer.num_experts:
                mean_pairs = float(rows.rows_R.mean()) * layer.top_k
                experts_s += count * self._experts_s(layer, mean_pairs / balancedness)
                even_s += count * self._experts_s(layer, mean_pairs)
                dispatch_s += count * self._dispatch_s(layer, rows, balancedness)
        whole = self._shares.whole
        return _Parts(own_R / whole, experts_s / whole, even_s / whole, dispatch_s / whole)

    def _own_s(self, layer: LayerCosts, rows: _Rows) -> np.ndarray:
        """Return the time of each rank for its own rows in one layer."""
        products = np.maximum(
            layer.own_bytes / self._memory, 2 * layer.own_weights * rows.rows_R / self._own_rate
        )
        decode, prefill = (
            _within(attended_R, count_R, layer.reach)
            for attended_R, count_R in (
                (rows.decode_attended_R, rows.decodes_R),
                (rows.prefill_attended_R, rows.rows_R - rows.decodes_R),
            )
        )
        read = decode * layer.cached_numbers + rows.decode_attended_R * layer.index_numbers
        context = np.maximum(
            read * self._engine.kv_bytes / self._memory, decode * layer.attended_flops / self._attention_rate
        )
        context += prefill * layer.prefill_flops / self._attention_rate
        states = 2 * layer.state_bytes * rows.decodes_R / self._memory
        passing = self._passing_s(layer.own_features * rows.rows_R)
        total: np.ndarray = products + context + states + passing + self._shares.layer_s
        return total

    def _passing_s(self, features: np.ndarray) -> np.ndarray:
        element_bytes = 4 if self._device.is_cpu else 2
        return features * (self._shares.passes * element_bytes / self._memory)

    def _experts_s(self, layer: LayerCosts, pairs: float) -> float:
        """Return the time for this number of pairs of a row and a slot, spread over a rank's slots at random."""
        active = self._slots * -np.expm1(-pairs / self._slots)
        padded = pairs + active * self._shares.padding_rows
        reading_s = active * layer.expert_bytes / self._memory
        multiplying_s = 2 * layer.expert_weights * padded / self._expert_rate
        passing_s = self._passing_s(np.asarray(layer.expert_features * pairs))
        return float(max(reading_s, multiplying_s) + passing_s)

    def _dispatch_s(self, layer: LayerCosts, rows: _Rows, balancedness: float) -> float:
        """Return the time that rows take to their experts' ranks and back; the fullest rank determines it."""
        num_ranks = len(rows.rows_R)
        if num_ranks == 1:
            return 0.0
        row = self._travel_s(
            float(rows.rows_R.mean()), layer.top_k, num_ranks, self._engine.sends, self._engine.row_bytes
        )
        answer = self._travel_s(
            float(rows.rows_R.mean()), layer.top_k, num_ranks, self._engine.returns, self._engine.answer_bytes
        )
        latency_s = 2 * self._latency_s(num_ranks)
        return (row + answer) / balancedness + latency_s

    def _travel_s(self, rows: float, top_k: int, num_ranks: int, sends: Sends, number_bytes: float) -> float:
        """Return the time of one direction; links inside a domain and the network work at the same time."""
        domain = min(num_ranks, self._device.link_ranks)
        inside, outside = _crossings(top_k, num_ranks, domain, sends)
        one = rows * self._costs.hidden_dim * number_bytes
        return max(
            one * inside / (self._device.link_bytes_per_s * self._shares.link),
            one * outside / (self._device.network_bytes_per_s * self._shares.network),
        )

    def _latency_s(self, num_ranks: int) -> float:
        is_inside = num_ranks <= self._device.link_ranks
        return self._shares.link_latency_s if is_inside else self._shares.network_latency_s

    def _reduce_s(self, rows: _Rows) -> float:
        """Return the time of two all-reduces: each device sends and receives its part of every sum once."""
        ways = self._reducing
        one = 2 * (ways - 1) / ways * float(rows.rows_R.max()) * self._costs.hidden_dim * 2
        inside = ways <= self._device.link_ranks
        rate = (
            self._device.link_bytes_per_s * self._shares.link
            if inside
            else self._device.network_bytes_per_s * self._shares.network
        )
        return 2 * (one / rate + self._latency_s(ways))

    def _other_s(self, sampled: float) -> float:
        """Return the time of the output projection for the sampled rows, and of the host."""
        reading_s = self._costs.head_bytes / self._memory
        rate = self._device.rate_of("bfloat16") * self._shares.products
        return max(reading_s, 2 * self._costs.head_weights * sampled / rate) + self._shares.step_s


def _arrays(ranks: Sequence[RankRows] | np.ndarray) -> _Rows:
    if isinstance(ranks, np.ndarray):
        prefill_R, decodes_R, attended_R, of_prompts_R = ranks.astype(np.float64).T
        rows_R = np.maximum(prefill_R + decodes_R, 1.0)
        return _Rows(rows_R, attended_R - of_prompts_R, of_prompts_R, decodes_R)
    given = [each._replace(prefill_attended_tokens=each.prefill_attended_tokens or 0) for each in ranks]
    prefill_R, decodes_R, attended_R, of_prompts_R = np.asarray(given, dtype=np.float64).T
    is_open_R = np.asarray([each.prefill_attended_tokens is None for each in ranks])
    rows_R = np.maximum(prefill_R + decodes_R, 1.0)  # an idle rank runs padding
    of_prompts_R = np.where(is_open_R, attended_R * prefill_R / rows_R, of_prompts_R)
    return _Rows(rows_R, attended_R - of_prompts_R, of_prompts_R, decodes_R)


def _within(attended_R: np.ndarray, count_R: np.ndarray, reach: int) -> np.ndarray:
    """Return the tokens that rows attend to if each sees at most `reach`; 0 is no limit."""
    return np.minimum(attended_R, count_R * reach) if reach else attended_R


def _crossings(top_k: int, num_ranks: int, domain: int, sends: Sends) -> tuple[float, float]:
    """Return how often a row is sent inside its domain of fast links, and out of it.

    Choices fall on ranks at random. A row that is sent once to a node is spread there through the links inside.
    """
    out = 1 - domain / num_ranks
    if sends == "choice":
        return top_k * (domain - 1) / num_ranks, top_k * out
    ranks = _distinct(num_ranks, top_k)
    if sends == "rank":
        return ranks * (domain - 1) / num_ranks, ranks * out
    domains = num_ranks / domain
    return ranks * (num_ranks - 1) / num_ranks, _distinct(domains, top_k) * out


def _distinct(places: float, choices: int) -> float:
    """Return the expected number of places that are chosen at least once."""
    return float(places * (1 - (1 - 1 / places) ** choices))
