"""Two dispatchers in the place of one: whose turn it is decides, and the turn goes when rows are on their way."""

import torch
from dispatch.alternating import AlternatingDispatcher

from dispatch.dispatcher import Dispatcher
from dispatch.wires.local import LocalWire
from tests.dispatch.oracle import compute_pairs, make_cases, simulate

S = 4


class Halves:
    """Two halves that are the test's own."""

    def __init__(self) -> None:
        self.current = 0
        self.events: list[str] = []

    def hand_over(self) -> None:
        self.events.append(f"half {self.current} hands over")


def test_halves_do_not_disturb_each_other_and_hand_over_after_their_own_work() -> None:
    """Both dispatch before either combines: one dispatcher would refuse the older rows."""
    turn, both = Halves(), [Dispatcher(LocalWire(), slots_per_rank=S) for _ in range(2)]
    dispatcher = AlternatingDispatcher(*both, turn)
    cases = [make_cases(seed, [5 + seed], slots_per_rank=S)[0] for seed in range(2)]
    sent = []
    for turn.current, case in enumerate(cases):
        sent.append(
            dispatcher.dispatch(
                case.x_TH, case.slots_TK, meanwhile=lambda: turn.events.append("work beside the rows")
            )
        )
    for turn.current, case in enumerate(cases):
        ours = sent[turn.current]
        y_PH = compute_pairs(ours.x_NH, ours.row_P, ours.slot_offsets, 0)
        combined = dispatcher.combine(y_PH, case.weights_TK, ours)
        assert torch.equal(combined, simulate([case], S)[0].combined_TH)
    work = "work beside the rows"
    rows = [work, "half 0 hands over", work, "half 1 hands over"]
    assert turn.events == [*rows, "half 0 hands over", "half 1 hands over"]


def test_what_it_says_of_itself_is_of_both() -> None:
    both = [Dispatcher(LocalWire(), slots_per_rank=S) for _ in range(2)]
    dispatcher = AlternatingDispatcher(*both, Halves())
    both[0]._dispatch_clock.add(5)
    both[1]._dispatch_clock.add(7)
    assert dispatcher.waits.dispatch_ns == 12 and dispatcher.sent_to_ranks() == ([0], [0])
    assert (dispatcher.world_size, dispatcher.name, dispatcher.is_replayable) == (1, "local", False)
    dispatcher.check()
    dispatcher.close()
