"""How long a step takes by its bounds: attention, experts, dispatch and imbalance, from a model's costs and a device. No torch.

Every part is the longer of what it reads from memory and what it multiplies (a roofline: Williams et al., 2009), at the
shares of the promised rates that published kernels achieve. The shares are one small set for all models, GPUs and engines,
each with its source below. One of them, `whole`, is from two published traces; how well the others' figures are then
foretold is printed by `wideep size --published`.

What it does not know: the network's topology beyond one domain of fast links, contention of messages, steps that wait
for the host, prefix hits, what other services do on the machine.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from server.sizing.devices import Device
from server.sizing.model_costs import LayerCosts, ModelCosts
from server.sizing.step_times import RankRows, StepCost

Sends = Literal["choice", "rank", "node"]


class Shares(NamedTuple):
    """What of a promised rate kernels achieve, and what a step costs beside. The same for all GPUs."""

    # DeepGEMM's README, 64 rows on H800 (3,350 GB/s): 1,688 to 2,668 GB/s; FlashMLA's: 3,000 GB/s.
    memory: float = 0.8
    # DeepGEMM's README: 1,550 TFLOPS of H800's 1,979 at most; less for other shapes than the best.
    products: float = 0.7
    # FlashMLA's README: 660 TFLOPS of H800's 989 in decodes; 1,460 of B200's 2,250 in prompts.
    attention: float = 0.65
    # DeepEP's README: 153 to 158 GB/s of H800's 200; TensorRT-LLM's blog 18: about 80 % of GB200's 900.
    link: float = 0.8
    # DeepEP's README: 43 GB/s through a card of 50, EP16.
    network: float = 0.86
    # TensorRT-LLM's blog 18: 19 and 31 us for one token among 8 GPUs.
    link_latency_s: float = 20e-6
    # DeepEP's README, 128 tokens among 128 GPUs: 192 us, of which 174 at 43 GB/s; and the sending side as much again.
    network_latency_s: float = 40e-6
    # Rows that a group of an expert's is rounded up by, on average: half of the 64 that grouped kernels take at once.
    padding_rows: float = 32.0
    # Passes over what enters and leaves a product: the product's own, and that of one kernel before or behind it (norm,
    # quantisation, rotation, activation, permutation).
    passes: float = 2.0
    # Some 20 kernels of a layer in a CUDA graph, 2 us from one to the next.
    layer_s: float = 40e-6
    # What is left of all these when kernels run together: tails, gaps, processors lent to messages. DeepSeek's two published
    # traces (H800, even routing) take 1.31 and 1.35 times what the shares above add up to; no other figure was asked.
    whole: float = 0.75
    # The host's part of a step: scheduling, sampling, the launch of a graph.
    step_s: float = 1e-3


GPU_SHARES = Shares()
# Measured rates are what is achieved; numpy's are near our kernels'. A layer is a call into compiled code.
MEASURED_SHARES = Shares(
    memory=1.0,
    products=1.0,
    attention=0.5,
    link=1.0,
    network=1.0,
    padding_rows=4.0,
    layer_s=20e-6,
    whole=1.0,
)
# One Zen 3 core reads 20 GB/s and multiplies 84 GFLOPS of 109 (docs/LOG.md).
CPU_SHARES = MEASURED_SHARES._replace(memory=0.8, products=0.75, network=0.8)


class EngineTraits(NamedTuple):
    """What an engine does that changes the time of a step."""

    name: str
    multiplies_codes: (
        bool  # quantised weights are multiplied as they are, not as the bfloat16 that they stand for
    )
    overlaps: bool  # one half of the rows is computed while the other travels
    row_bytes: float  # of a number of a row on its way to experts
    answer_bytes: float  # of one on its way back
    kv_bytes: float  # of a cached number
    sends: Sends  # how often a row goes out: to every choice, to every rank or node that has one
    returns: Sends  # likewise answers


WIDEEP = EngineTraits("WideEP", False, False, 2, 2, 2, "rank", "choice")
WIDEEP_CPU = EngineTraits("WideEP on CPU", False, False, 4, 4, 4, "rank", "choice")


def shares_of(device: Device) -> Shares:
    """What of a device's rates is achieved."""
    if not device.is_cpu:
        return GPU_SHARES
    return MEASURED_SHARES if device.is_measured else CPU_SHARES


class _Rows(NamedTuple):
    """What each of R ranks runs, as arrays."""

    rows_R: np.ndarray
    decode_attended_R: np.ndarray
    prefill_attended_R: np.ndarray
    decodes_R: np.ndarray

    def times(self, share: float) -> "_Rows":
        return _Rows(*(each * share for each in self))


class _Parts(NamedTuple):
    own_R: np.ndarray
    experts_s: float  # of the fullest rank
    even_experts_s: float  # if all were as full
    dispatch_s: float


class Roofline:
    """`StepTimes` of one model on one device under expert parallelism; with one rank, on a single device."""

    def __init__(
        self,
        costs: ModelCosts,
        device: Device,
        engine: EngineTraits,
        *,
        slots_per_rank: int,
        shares: Shares | None = None,
        reducing: int = 1,
    ) -> None:
        """Set up.

        Args:
            costs: of the model; of one device's part under tensor parallelism.
            device: what a rank has of it.
            slots_per_rank: of a layer.
            reducing: devices that add up their parts after attention and experts, under tensor parallelism; 1: none.
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
        """See `StepTimes`."""
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
        """Operations per second on weights that are stored so."""
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
        """What each rank takes for its own rows in one layer."""
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
            read * self._engine.kv_bytes / self._memory,
            decode * layer.attended_flops / self._attention_rate,
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
        """What a rank takes for so many pairs of a row and a slot, spread over its slots at random."""
        active = self._slots * -np.expm1(-pairs / self._slots)
        padded = pairs + active * self._shares.padding_rows
        reading_s = active * layer.expert_bytes / self._memory
        multiplying_s = 2 * layer.expert_weights * padded / self._expert_rate
        passing_s = self._passing_s(np.asarray(layer.expert_features * pairs))
        return float(max(reading_s, multiplying_s) + passing_s)

    def _dispatch_s(self, layer: LayerCosts, rows: _Rows, balancedness: float) -> float:
        """What rows take to the ranks of their experts and home again; the fullest rank's are the most."""
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
        """Links inside a domain and the network work at the same time."""
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
        """Two sums of all devices' parts: each is sent and received once, cut by the number of devices."""
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
        """The output projection of the rows that are sampled, and the host's part."""
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
    rows_R = np.maximum(prefill_R + decodes_R, 1.0)  # a rank with nothing to do runs padding
    of_prompts_R = np.where(is_open_R, attended_R * prefill_R / rows_R, of_prompts_R)
    return _Rows(rows_R, attended_R - of_prompts_R, of_prompts_R, decodes_R)


def _within(attended_R: np.ndarray, count_R: np.ndarray, reach: int) -> np.ndarray:
    """Tokens that rows attend to where each sees `reach` at most; 0: all."""
    return np.minimum(attended_R, count_R * reach) if reach else attended_R


def _crossings(top_k: int, num_ranks: int, domain: int, sends: Sends) -> tuple[float, float]:
    """How often a row travels inside its domain of fast links, and out of it.

    Choices fall on ranks at random. A row that goes once to a node is spread there through the links inside.
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
    """How many of some places are chosen at least once."""
    return float(places * (1 - (1 - 1 / places) ** choices))
