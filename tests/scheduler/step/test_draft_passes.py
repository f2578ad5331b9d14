"""Several layers draft in sequence: each gets the token before the one that it drafts."""

from functools import partial
from pathlib import Path

from benchmarks.models.foreseeing import foresee
from scheduler.policy.speculative import parse_speculative_config
from tests.scheduler.drafts.test_served_drafts import MTP, always_draft, drafter_of
from tests.support.engines.serving import build, request, serve
from tests.support.models.mtp import write_mtp_checkpoint

NEARLY_RIGHT = 0.002  # scale of layer outputs: nearly all drafts are right if their inputs are


def test_the_last_of_three_layers_drafts_as_well_as_the_first(tmp_path: Path) -> None:
    """Also after a step in which a sequence had one row."""
    write_mtp_checkpoint("mimo_v2_flash", tmp_path, num_layers=3, change=partial(foresee, share=NEARLY_RIGHT))
    built = build(tmp_path, max_model_len=160, speculative_config=parse_speculative_config(MTP))
    always_draft(None, [0, 0], built)
    wanted = [request(str(at), range(3 + at, 3 + at + at % 5 + 1), max_tokens=4 + at) for at in range(12)]
    serve(built, wanted)
    first, _, last = drafter_of(built).counts.accepted_at
    assert first > 20 and last > 0.7 * first
