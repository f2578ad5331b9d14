"""Published figures against predicted ones: a change of the roofline shows here."""

from collections import Counter
from pathlib import Path

import pytest

from server.tools.size.costs.device_table import DEVICES
from server.tools.size.published import FIGURES, MODELS, compare, costs_of, median_error
from server.tools.size.report import published_text

ROOT = Path(__file__).resolve().parents[4]
# All weights, and the weights used per token, in 10^9, from the models' cards. Embeddings are not multiplied.
_CARDS = {
    "deepseek-v3": (671, 37),
    "deepseek-v3-nvfp4": (671, 37),
    "kimi-k2": (1026, 32),
    "qwen3-235b": (235, 22),
    "qwen3-235b-fp8": (235, 22),
    "gpt-oss-120b": (117, 5.1),
}


@pytest.mark.slow  # builds 61 layers and more on the meta device
@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_weights_that_their_cards_say(model: str) -> None:
    costs = costs_of(model)
    total, active = _CARDS[model]
    assert costs.total_weights / 1e9 == pytest.approx(total, rel=0.01)
    assert costs.active_weights / 1e9 == pytest.approx(active, rel=0.03)


def test_every_figure_has_a_source_and_most_are_not_asked() -> None:
    assert len(FIGURES) >= 8
    assert all(figure.source.startswith("https://") for figure in FIGURES)
    assert all(figure.device in DEVICES and figure.model in MODELS for figure in FIGURES)
    assert Counter(figure.is_asked for figure in FIGURES)[True] == 2
    assert len({figure.what for figure in FIGURES}) == len(FIGURES)


@pytest.mark.slow
def test_published_figures_are_foretold_as_well_as_docs_say() -> None:
    compared = [compare(figure, costs_of(figure.model)) for figure in FIGURES]
    text = published_text(compared)
    assert text in (ROOT / "docs" / "sizing_accuracy.md").read_text()
    assert f"{median_error(compared):.0%}".replace("%", " %") in (ROOT / "README.md").read_text()
    for each in compared:
        assert each.figure.what in text and each.figure.source in text
