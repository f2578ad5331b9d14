"""Progress of steps: layers count for the run that wrote them, and for no other."""

import pytest

from kvcache.progress import Progress


def test_layers_count_only_during_their_run() -> None:
    progress = Progress()
    coming = progress.run + 1
    assert progress.layers_of(coming) == 0
    with progress.running():
        assert (progress.run, progress.layers_of(coming)) == (coming, 0)
        progress.note(3)
        assert progress.layers_of(coming) == 3
        assert progress.layers_of(coming - 1) == progress.layers_of(coming + 1) == 0
    assert (progress.run, progress.layers_of(coming)) == (coming + 1, 0)
    progress.note(2)  # as layers that draft do between two runs
    assert progress.layers_of(coming) == progress.layers_of(coming + 2) == 0


def test_a_step_that_fails_ends_its_run() -> None:
    progress = Progress()
    with pytest.raises(OSError, match="lost"), progress.running():
        raise OSError("lost")
    assert progress.run % 2 == 0
