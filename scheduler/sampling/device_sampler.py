"""Sampling on a GPU, a whole batch at once, with the order, rules and random numbers of `scheduler.sampling.sampler`.

The plan of `scheduler.sampling.plan` is applied while the device still computes the logits. Only work on whole rows is
done on the device. Behind the launches, one copy takes the token ids, and the few numbers of each row with logprobs, to the
host. The next step may be launched before the host reads it.

Greedy rows take their largest logit. Sampled rows are weighted with exp((logit - top) / temperature). With filters,
tokens are ordered by falling weight, equal weights by id, and top-k, min-p and top-p each keep a prefix of that order.
Sums use whole units in int64, so that they are exact and no row's token or logprob depends on other rows. Tokens equal
the CPU's for the same logits, unless a draw falls within about 1e-7 of a border between two tokens.

Engines choose tokens with the Triton kernels of `scheduler.sampling.gpu`, which do not sort. `choose_tokens` does the same in
plain torch with a stable sort. It is the kernels' oracle, and their substitute without Triton.

Rules yield if they would leave nothing to sample. The plan can judge only the sets of tokens. If all allowed tokens of a
row have logits of -inf, the row is sampled on the CPU from the model's logits (a second read).

Legend: R rows, V vocabulary, M masked rows, W words of 32 bits, E edits of single logits, D sampled rows, K rows with
kept logits, N further tokens with logprobs per row.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dispatch.gpu.host_copy import HostCopy
from scheduler.policy.request import Logprobs, Request, SamplingParams
from scheduler.policy.sequence import Sequence, TokenContext
from scheduler.sampling.plan import MOST_ROWS, LogprobQuery, SamplingPlan, make_plan, send
from scheduler.sampling.sampler import Sampled, make_logprobs, sample

_WEIGHT_UNITS = 2.0**40  # weight of the top; tokens lighter than 1 unit are never drawn
_SUM_UNITS = 2.0**44  # exponential of the top, for logprobs; 2^19 tokens do not overflow
_SUM, _TOP, _MINE, _RANK, _OTHERS = range(5)  # columns of a row's result; ids and logits of others follow
_LOWER = 0xFFFFFFFF

Choose = Callable[[Tensor, SamplingPlan], Tensor]  # `choose_tokens` or the kernels


class DeviceSampler:
    """Samples on the model's device; a `scheduler.sampling.sampler.Sampler`.

    Attributes:
        num_host_rows: Counter of rows that had to be sampled on the CPU; see the module.
    """

    def __init__(self, device: torch.device, choose: Choose | None = None) -> None:
        """`choose`: chooses tokens, as `choose_tokens`, which is the default."""
        self._device, self._choose = device, choose or choose_tokens
        self.num_host_rows = 0

    def warm_up(self, vocabulary: int) -> None:
        """Load everything that steps use."""
        greedy = SamplingParams(max_tokens=1, temperature=0.0)
        ruled = replace(greedy, allowed_token_ids=(0,), presence_penalty=1.0, num_logprobs=1)
        drawn, filtered = (replace(greedy, temperature=1.0, top_p=top_p) for top_p in (1.0, 0.5))
        for each in ([greedy], [ruled], [drawn, filtered]):
            sequences = []
            for params in each:
                request = Request(request_id="", prompt_ids=(0,), params=params, arrival_s=0.0)
                sequences.append(Sequence.from_request(request))
                sequences[-1].token_ids.append(0)
            self.sample(torch.zeros(len(each), vocabulary, device=self._device), sequences)

    def sample(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> Sampled:
        return self.begin(logits_RV, contexts).read()

    def begin(self, logits_RV: Tensor, contexts: Rows[TokenContext]) -> "DeviceDrawing":
        if not contexts:
            return DeviceDrawing(
                self, [], None, logits_RV, [torch.empty(0, dtype=torch.int64, device=self._device)]
            )
        logits_RV = logits_RV.contiguous()
        plan = make_plan(contexts, logits_RV.shape[1], self._device)
        if plan.edited_E.numel():
            logits_RV = logits_RV.float()  # does nothing if they are float32
        kept_KV = logits_RV.index_select(0, plan.kept_row_K) if plan.kept_rows else logits_RV
        return DeviceDrawing(self, contexts, plan, kept_KV, self._launch(logits_RV, kept_KV, plan))

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        asked = [LogprobQuery(row, row, num_top) for row in range(len(next_ids))]
        token_C = send({"token": np.array(next_ids, np.int64)}, self._device)["token"]
        found = HostCopy([measure(logits_CV.contiguous(), asked, token_C).flatten()]).read()
        return read_measured(found, asked, next_ids, logits_CV.shape[1], with_rank=True)

    def _launch(self, logits_RV: Tensor, kept_KV: Tensor, plan: SamplingPlan) -> list[Tensor]:
        """Return int64 tensors: token ids [R], whether each masked row has no token left [M], and numbers for logprobs."""
        id_R = self._choose(logits_RV, plan)
        parts = [id_R]
        if plan.masked_rows:  # the token of such a row has a logit of -inf
            row_M = plan.masked_row_M
            place_M = row_M * logits_RV.shape[1] + id_R.index_select(0, row_M)
            parts.append(logits_RV.view(-1).index_select(0, place_M).isneginf().long())
        if plan.asked:
            parts.append(measure(kept_KV, plan.asked, id_R).flatten())
        return parts


class DeviceDrawing:
    """A `scheduler.sampling.sampler.Drawing` on the device. Its numbers are copied to the host behind the launches."""

    def __init__(
        self,
        sampler: DeviceSampler,
        contexts: Rows[TokenContext],
        plan: SamplingPlan | None,
        kept_KV: Tensor,
        parts: list[Tensor],
    ) -> None:
        """Take the results of `_launch`. `plan` is None for a step that samples nothing."""
        self._sampler, self._contexts, self._plan, self._kept_KV = sampler, contexts, plan, kept_KV
        self.token_R = parts[0]
        # The CPU may replace the token of a masked row.
        self.is_settled = plan is None or not plan.masked_rows
        self._copy = HostCopy(parts)

    def read(self) -> Sampled:
        found, plan, kept_KV, V = self._copy.read(), self._plan, self._kept_KV, self._kept_KV.shape[1]
        if plan is None:
            return Sampled([], [])
        R = len(self._contexts)
        token_ids: list[int] = found[:R].tolist()
        logprobs: list[Logprobs | None] = [None] * R
        if plan.asked:
            told = read_measured(found[-measured_size(plan.asked, V) :], plan.asked, token_ids, V)
            for each, one in zip(plan.asked, told, strict=True):
                logprobs[each.token] = one
        for place, row in enumerate(plan.masked_rows):
            if found[R + place]:  # no token is left
                own_1V = kept_KV[plan.kept_rows.index(row)][None].float().cpu()
                again = sample(own_1V, [self._contexts[row]])
                token_ids[row], logprobs[row] = again.token_ids[0], again.logprobs[0]
                self._sampler.num_host_rows += 1
        return Sampled(token_ids, logprobs)


def choose_tokens(logits_RV: Tensor, plan: SamplingPlan) -> Tensor:
    """Choose a token per row in plain torch. Does not wait for the device.

    Args:
        logits_RV: float32 contiguous. Rows with a mask or edits are changed in place.

    Returns:
        int64 [R].
    """
    if logits_RV.dtype != torch.float32 or not logits_RV.is_contiguous():
        raise ValueError(
            f"logits_RV is {logits_RV.dtype} with strides {logits_RV.stride()}; it must be contiguous float32"
        )
    edit_logits(logits_RV, plan)
    _mask(logits_RV, plan)
    id_R = logits_RV.argmax(dim=1)
    begin = 0
    for draw in plan.draws:
        of_draw = slice(begin, begin + len(draw.rows))
        _draw(logits_RV, plan, of_draw, id_R, is_filtered=draw.is_filtered)
        begin = of_draw.stop
    return id_R


def edit_logits(logits_RV: Tensor, plan: SamplingPlan) -> None:
    """Apply bias, repetition penalty, then frequency and presence penalties to the few logits that have them."""
    if not plan.edited_E.numel():
        return
    flat = logits_RV.view(-1)
    x_E = flat.index_select(0, plan.edited_E) + plan.bias_E
    x_E = torch.where(x_E > 0, x_E / plan.penalty_E, x_E * plan.penalty_E)
    flat.index_copy_(0, plan.edited_E, x_E - plan.subtracted_E)


def _mask(logits_RV: Tensor, plan: SamplingPlan) -> None:
    """Forbid the tokens that a row's mask excludes."""
    if not plan.masked_rows:
        return
    V = logits_RV.shape[1]
    bit_32 = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_MV = ((plan.mask_MW[:, :, None] >> bit_32) & 1).bool().flatten(1)[:, :V]
    masked_MV = logits_RV.index_select(0, plan.masked_row_M).masked_fill_(~allowed_MV, -float("inf"))
    logits_RV.index_copy_(0, plan.masked_row_M, masked_MV)


def _draw(logits_RV: Tensor, plan: SamplingPlan, of_draw: slice, id_R: Tensor, *, is_filtered: bool) -> None:
    """Replace the greedy tokens of some rows by drawn ones, except in rows without finite logits or with NaN."""
    row_D = plan.row_D[of_draw]
    x_DV = logits_RV.index_select(0, row_D)
    top_D1 = x_DV.amax(dim=1, keepdim=True)
    weight_DV = ((x_DV - top_D1) * plan.inverse_temperature_D[of_draw, None]).exp_().nan_to_num_(0.0)
    id_DV = None
    if is_filtered:
        weight_DV, id_DV = weight_DV.sort(dim=1, descending=True, stable=True)
    unit_DV = (weight_DV * _WEIGHT_UNITS).long()
    if is_filtered:
        rank_V = torch.arange(unit_DV.shape[1], device=unit_DV.device)
        stays_DV = rank_V < plan.top_k_D[of_draw, None]
        unit_DV *= stays_DV & (weight_DV >= plan.least_weight_D[of_draw, None])
        before_DV = unit_DV.cumsum(dim=1) - unit_DV
        enough_D1 = plan.top_p_D[of_draw, None] * unit_DV.sum(dim=1, keepdim=True).double()
        unit_DV *= (before_DV.double() < enough_D1) | (rank_V == 0)
    passed_DV = unit_DV.cumsum(dim=1)
    mass_D1 = passed_DV[:, -1:]
    wanted_D1 = (plan.uniform_D[of_draw, None] * mass_D1.double()).long().minimum(mass_D1 - 1)
    place_D1 = torch.searchsorted(passed_DV, wanted_D1, right=True).clamp_(max=passed_DV.shape[1] - 1)
    drawn_D = (place_D1 if id_DV is None else id_DV.gather(1, place_D1)).squeeze(1)
    chosen_D = torch.where(top_D1.squeeze(1).isfinite(), drawn_D, id_R.index_select(0, row_D))
    id_R.index_copy_(0, row_D, chosen_D)


def measure(logits_KV: Tensor, asked: Rows[LogprobQuery], token_T: Tensor) -> Tensor:
    """Compute the numbers for `Logprobs`. Does not wait for the device.

    The most likely tokens are found by distinct integers with the order (logit, lower id first), so that `torch.topk`
    has no ties to break.

    Args:
        logits_KV: Contiguous.
        asked: L rows, at least one.
        token_T: int64 tokens; each query names one.

    Returns:
        int64 [L, 4 + 2 N], for `read_measured` once it is on the host.
    """
    V, N, num_top = logits_KV.shape[1], _width(asked, logits_KV.shape[1]), _num_top(asked, logits_KV.shape[1])
    given_LN = np.zeros((len(asked), N), np.int64)
    for row, each in zip(given_LN, asked, strict=True):
        row[: len(each.ids)] = each.ids
    sent = send(
        {
            "place": np.array([each.place for each in asked]),
            "token": np.array([each.token for each in asked]),
            "is_given": np.array([[bool(each.ids)] for each in asked]),
            "given": given_LN,
        },
        logits_KV.device,
    )
    parts = []
    for begin in range(0, len(asked), MOST_ROWS):
        part = {name: each[begin : begin + MOST_ROWS] for name, each in sent.items()}
        x_LV = logits_KV.index_select(0, part["place"]).float()
        top_L1 = x_LV.amax(dim=1, keepdim=True)
        sum_L = ((x_LV - top_L1).exp_().double() * _SUM_UNITS).long().sum(dim=1)
        mine_L1 = x_LV.gather(1, token_T.index_select(0, part["token"])[:, None])
        rank_L = 1 + (x_LV > mine_L1).sum(dim=1)
        id_LN = part["given"]
        if num_top:
            id_LN[:, :num_top] = torch.where(part["is_given"], id_LN[:, :num_top], _likeliest(x_LV, num_top))
        numbers = torch.cat((top_L1, mine_L1, x_LV.gather(1, id_LN)), dim=1).double().view(torch.int64)
        parts.append(
            torch.cat((sum_L[:, None], numbers[:, :2], rank_L[:, None], id_LN, numbers[:, 2:]), dim=1)
        )
    assert V < 2**19, "sums of exponentials overflow"
    return torch.cat(parts)


def read_measured(
    found: np.ndarray,
    asked: Rows[LogprobQuery],
    token_ids: Rows[int],
    vocabulary: int,
    *,
    with_rank: bool = False,
) -> list[Logprobs]:
    """Build logprobs from the result of `measure`.

    Args:
        found: The result, as a flat array.
        token_ids: Values of `token_T`.
    """
    found_LC = found.reshape(len(asked), -1)
    width = (found_LC.shape[1] - _OTHERS) // 2
    made = []
    for each, own, numbers in zip(asked, found_LC, found_LC.view(np.float64), strict=True):
        count = len(each.ids) or min(each.num_top, vocabulary)
        base = float(numbers[_TOP]) + float(np.log(float(own[_SUM]) / _SUM_UNITS))
        logits = numbers[_OTHERS + width :][:count].astype(np.float32)
        rank = int(own[_RANK]) if with_rank else 0
        ids, mine = own[_OTHERS:][:count], float(numbers[_MINE])
        made.append(make_logprobs(token_ids[each.token], mine, base, ids, logits, rank))
    return made


def measured_size(asked: Rows[LogprobQuery], vocabulary: int) -> int:
    """Return the number of values that `measure` returns."""
    return len(asked) * (_OTHERS + 2 * _width(asked, vocabulary))


def _num_top(asked: Rows[LogprobQuery], vocabulary: int) -> int:
    return min(max((each.num_top for each in asked if not each.ids), default=0), vocabulary)


def _width(asked: Rows[LogprobQuery], vocabulary: int) -> int:
    return max(_num_top(asked, vocabulary), *(len(each.ids) for each in asked), 0)


def _likeliest(x_LV: Tensor, count: int) -> Tensor:
    """Return ids by falling logit, lower ids first among equals. int64 [L, count]."""
    V = x_LV.shape[1]
    bits = (x_LV + 0.0).view(torch.int32)  # the sum turns -0 into 0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    key_LV = (order << 32) + torch.arange(V - 1, -1, -1, device=x_LV.device)
    return V - 1 - (key_LV.topk(count, dim=1).values & _LOWER)
