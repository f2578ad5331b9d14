"""The label of a token arrives with its row in both modes, and changes nothing else. Adapters use it for their places."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dispatch.mode import NORMAL, Mode, low_latency
from tests.dispatch.exchange import catch
from tests.dispatch.gpu.ranks import Outcome, S, answer, open_wide, run_layer
from tests.dispatch.gpu.test_dispatcher import draw, open_unwatched
from tests.dispatch.gpu.test_replay import recording
from tests.dispatch.oracle import RankCase, simulate
from tests.support.gpu.graph_safe import graph_safe_launches
from tests.support.gpu.interpreted import needs_triton
from tests.support.ranks import RankPool

pytestmark = needs_triton

MOST = (1 << 15) - 2
LAYERS = [
    draw(1, [3, 2], hidden=200, choices=2, dtype=torch.bfloat16),
    draw(2, [4, 0], hidden=260, choices=2, dtype=torch.bfloat16),
    draw(5, [2, 2], only_slot=4, no_choice=0.0, dtype=torch.bfloat16),
]


def labels_of(rank: int, tokens: int) -> Tensor:
    return (
        torch.tensor([-1, 7, 0, MOST])[:tokens]
        - (rank if tokens > 1 else 0) * torch.tensor([0, 1, 0, 1])[:tokens]
    )


def run_labelled(
    layers: list[list[RankCase]], rows: str, mode: Mode
) -> list[tuple[Tensor, Outcome, Outcome]]:
    """Return the label of each pair, and results with labels and without."""
    dispatcher, rank, found = open_wide(rows=rows), dist.get_rank(), []
    for cases in layers:
        case = cases[rank]
        label_T = labels_of(rank, len(case.x_TH))
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK, mode, label_T=label_T)
        row_P = sent.row_P[: int(sent.slot_offsets[-1])]
        label_P, x_PH, offsets = (
            sent.label_N[row_P].clone(),
            sent.x_NH[row_P].clone(),
            sent.slot_offsets.clone(),
        )
        weights_TK = torch.where(case.slots_TK < 0, float("nan"), case.weights_TK)
        combined = dispatcher.combine(answer(sent, rank), weights_TK, sent).clone()
        found.append((label_P, Outcome(x_PH, offsets, combined), run_layer(dispatcher, case, mode)))
    dist.barrier()
    dispatcher.close()
    return found


@pytest.mark.parametrize("rows", ["auto", "fp8"])
@pytest.mark.parametrize("mode", [NORMAL, low_latency(4)])
def test_labels_arrive_with_their_rows(interpreting_pair: RankPool, mode: Mode, rows: str) -> None:
    results = interpreting_pair.run(run_labelled, LAYERS, rows, mode)
    for index, cases in enumerate(LAYERS):
        labelled = [
            case._replace(x_TH=labels_of(rank, len(case.x_TH)).double()[:, None])
            for rank, case in enumerate(cases)
        ]
        for rank, want in enumerate(simulate(labelled, S)):
            label_P, with_labels, without = results[rank][index]
            assert torch.equal(label_P, want.x_NH[want.row_P][:, 0].long()), f"layer {index}, rank {rank}"
            for name, ours, plain in zip(Outcome._fields, with_labels, without, strict=True):
                assert torch.equal(ours, plain), f"layer {index}, rank {rank}, {name}"


def replay(layers: list[list[RankCase]]) -> list[Tensor]:
    """Record a dispatch under the guard, then repeat it with other contents. Return the labels of pairs."""
    dispatcher, rank, mode = open_unwatched(timeout_s=5.0), dist.get_rank(), low_latency(3)
    case = RankCase(*(tensor.clone() for tensor in layers[0][rank]))
    label_T = labels_of(rank, 3)
    dispatcher.dispatch(case.x_TH, case.slots_TK, mode, label_T=label_T)
    dist.barrier()
    with recording() as launches, graph_safe_launches():
        sent = dispatcher.dispatch(case.x_TH, case.slots_TK, mode, label_T=label_T)
    found = []
    for layer in layers:
        case.slots_TK.copy_(layer[rank].slots_TK)
        label_T.add_(1)
        for launch in launches:
            launch()
        found.append(sent.label_N[sent.row_P[: int(sent.slot_offsets[-1])]].clone())
        dist.barrier()
    dispatcher.close()
    return found


def test_a_replay_sends_the_labels_of_its_step(interpreting_pair: RankPool) -> None:
    layers = [draw(seed, [3, 3]) for seed in (1, 2)]
    results = interpreting_pair.run(replay, layers)
    for index, cases in enumerate(layers):
        labelled = [
            case._replace(x_TH=(labels_of(rank, 3) + index + 1).double()[:, None])
            for rank, case in enumerate(cases)
        ]
        for rank, want in enumerate(simulate(labelled, S)):
            assert torch.equal(results[rank][index], want.x_NH[want.row_P][:, 0].long())


def disagree(mode: Mode) -> str:
    """Send labels on one rank only."""
    dispatcher, case = open_wide(), draw(1, [3, 2])[dist.get_rank()]
    label_T = labels_of(0, len(case.x_TH)) if dist.get_rank() else None
    message = catch(lambda: dispatcher.dispatch(case.x_TH, case.slots_TK, mode, label_T=label_T))
    dist.barrier()
    dispatcher.close()
    return message


@pytest.mark.parametrize("mode", [NORMAL, low_latency(4)])
def test_labels_of_some_ranks_only_are_noticed(interpreting_pair: RankPool, mode: Mode) -> None:
    for message in interpreting_pair.run(disagree, mode):
        assert message.startswith("RanksDisagree"), message
