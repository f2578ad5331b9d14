"""Samples a step's rows on a GPU for the runner, which sees what `scheduler.sampling.sampler` gives it on the CPU.

Logits stay on the device. The host reads once, after everything is launched: token ids, and of rows whose logprobs are
asked for the few numbers that those are made of. Structures, rules and penalties travel beside the step (`draws`).

Rules give way where they would leave nothing to sample. That is decided beside the step too, by what they allow; only a
row of which all that they allow is -inf of its own is not foreseen. It is noticed, and sampled on the CPU from the
logits as the model left them (a second read), so that its token is the CPU's as well; `num_host_rows` counts these.

Legend: R rows, V vocabulary, K rows that are kept as the model left them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scheduler.policy.request import Logprobs, Request, SamplingParams
from scheduler.policy.sequence import Sequence
from scheduler.sampling.gpu.draws import Draws, plan_draws
from scheduler.sampling.gpu.logprobs import Asked, answers, measure, size_of
from scheduler.sampling.gpu.sampling import SamplingScratch, choose_tokens
from scheduler.sampling.gpu.sending import send
from scheduler.sampling.sampler import Sampled, sample


class DeviceSampler:
    """Sampling with memory of its own, for one step at a time; a `scheduler.sampling.sampler.Sampler`.

    Attributes:
        num_host_rows: counter of rows that had to be sampled on the CPU; see the module.
    """

    def __init__(
        self,
        max_rows: int,
        vocabulary: int,
        device: torch.device,
        *,
        wait: Callable[[], None] | None = None,
    ) -> None:
        """Reserve memory for steps that sample so many rows at most.

        Args:
            wait: returns when the device has done what was launched; None: the device's own way.
        """
        self._scratch = SamplingScratch(max_rows, vocabulary, device)
        self._device, self._wait = device, wait or partial(_wait_for, device)
        self.num_host_rows = 0

    def warm_up(self) -> None:
        """Compile what steps use: every kernel, in each of its forms."""
        for temperature in (0.0, 1.0):
            plain = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.5)
            ruled = replace(plain, allowed_token_ids=(0,), presence_penalty=1.0, num_logprobs=1)
            for params in (plain, ruled):
                request = Request(request_id="", prompt_ids=(0,), params=params, arrival_s=0.0)
                sequence = Sequence.from_request(request)
                sequence.token_ids.append(0)
                logits_1V = torch.zeros(1, self._scratch.vocabulary, device=self._device)
                self.sample(logits_1V, [sequence])

    def sample(self, logits_RV: Tensor, sequences: Rows[Sequence]) -> Sampled:
        """Choose a token per row; see `scheduler.sampling.sampler.Sampler`."""
        if not sequences:
            self._wait()  # the runner may fill the step's memory on the host again once this returns
            return Sampled([], [])
        logits_RV = logits_RV.contiguous()
        R, V = logits_RV.shape
        plan = _plan(logits_RV, sequences)
        found = _read(self._launch(logits_RV, plan))
        token_ids: list[int] = found[:R].tolist()
        logprobs: list[Logprobs | None] = [None] * R
        if plan.asked:
            told = answers(found[-size_of(plan.asked, V) :], plan.asked, token_ids, V)
            for each, one in zip(plan.asked, told, strict=True):
                logprobs[each.token] = one
        for row in plan.draws.masked_rows:
            if found[R + row]:  # nothing is left
                again = sample(plan.kept_KV[plan.place_of[row]][None].cpu(), [sequences[row]])
                token_ids[row], logprobs[row] = again.token_ids[0], again.logprobs[0]
                self.num_host_rows += 1
        return Sampled(token_ids, logprobs)

    def _launch(self, logits_RV: Tensor, plan: "_Plan") -> list[Tensor]:
        """Return token ids [R]; where rows have masks, whether nothing is left [R]; and what makes logprobs. int64."""
        ids_R = choose_tokens(logits_RV, plan.draws, self._scratch)
        parts = [ids_R]
        if plan.draws.masked_rows:
            parts.append(self._scratch.top_values[: len(ids_R)].amax(dim=1).isneginf().long())
        if plan.asked:
            parts.append(measure(plan.kept_KV, plan.asked, ids_R).flatten())
        return parts

    def score(self, logits_CV: Tensor, next_ids: Rows[int], num_top: int) -> list[Logprobs]:
        """Say how likely each row found the token that follows it; see `scheduler.sampling.sampler.Sampler`."""
        asked = [Asked(row, row, num_top) for row in range(len(next_ids))]
        token_C = send({"token": np.array(next_ids, np.int64)}, self._device)["token"]
        found = _read([measure(logits_CV.contiguous(), asked, token_C).flatten()])
        return answers(found, asked, next_ids, logits_CV.shape[1], with_rank=True)


class _Plan(NamedTuple):
    draws: Draws
    kept_KV: Tensor  # as the model left them
    place_of: dict[int, int]  # rows among the kept ones
    asked: list[Asked]


def _plan(logits_RV: Tensor, sequences: Rows[Sequence]) -> _Plan:
    """Say what is done with each row, and keep the logits that are needed again after they have changed."""
    R, V = logits_RV.shape
    draws = plan_draws(sequences, V, logits_RV.device)
    params = [each.request.params for each in sequences]
    asking = [row for row, each in enumerate(params) if each.num_logprobs is not None]
    rows = sorted({*asking, *draws.masked_rows}) if draws.changes else []
    place_of = {row: place for place, row in enumerate(rows or range(R))}
    asked = [
        Asked(place_of[row], row, params[row].num_logprobs or 0, params[row].logprob_token_ids)
        for row in asking
    ]
    if not rows:
        return _Plan(draws, logits_RV, place_of, asked)
    row_K = send({"row": np.array(rows, np.int64)}, logits_RV.device)["row"]
    return _Plan(draws, logits_RV.index_select(0, row_K), place_of, asked)


def _read(parts: list[Tensor]) -> np.ndarray:
    """Copy numbers to the host; waits for all that was launched."""
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    found: np.ndarray = packed.numpy(force=True)
    return found


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
