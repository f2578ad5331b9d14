"""The number of drafts follows from their past gain and from the cost of rows."""

import pytest

from scheduler.drafts.pays import Acceptance, StepCosts, drafts_that_pay


def costs(first_s: float, row_s: float, *rows: int) -> StepCosts:
    made = StepCosts()
    for count in rows:
        made.note(count, first_s + row_s * count)
    return made


def test_costs_lie_on_the_line_between_what_is_known() -> None:
    known = costs(3.0, 1.0, 2, 8)
    assert [known.at(rows) for rows in (1, 2, 4, 8, 20)] == [5.0, 5.0, 7.0, 11.0, 11.0]
    assert StepCosts().at(4) == 0.0


def test_one_slow_step_changes_nothing() -> None:
    known = costs(3.0, 1.0, 1, 4)
    for _ in range(5):
        known.note(4, 7.0)
    known.note(4, 100.0)
    assert known.at(4) == 7.0


@pytest.mark.parametrize(
    ("share", "row_s", "num_running", "wanted"),
    [
        (1.0, 0.1, 1, 4),  # rows are cheap: as many as allowed
        (0.0, 0.1, 1, 0),
        (0.5, 100.0, 1, 0),  # each row costs nearly a step
        (0.9, 1.0, 1, 4),
        (0.9, 1.0, 64, 0),  # a large batch pays for rows
        (0.3, 1.0, 1, 0),
    ],
)
def test_drafts_are_as_many_as_pay(share: float, row_s: float, num_running: int, wanted: int) -> None:
    known = costs(2.0, row_s, 1, 2, 3, 4, 5, 64, 320)
    assert drafts_that_pay(share, known.of_drafts(num_running, 4)) == wanted


def test_what_was_not_measured_is_tried() -> None:
    assert drafts_that_pay(0.7, costs(2.0, 1.0, 1).of_drafts(1, 4)) == 4


def test_acceptance_forgets() -> None:
    acceptance = Acceptance()
    for _ in range(30):
        acceptance.note(4, 0)
    assert acceptance.share < 0.02
    for _ in range(30):
        acceptance.note(4, 4)
    assert acceptance.share > 0.95
    acceptance.note(0, 0)
    assert acceptance.tokens_since_try == 1


def test_what_lies_behind_a_wrong_draft_says_nothing() -> None:
    one, two = Acceptance(), Acceptance()
    one.note(8, 1)
    two.note(2, 1)
    assert one.share == two.share
