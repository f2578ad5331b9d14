"""Forked commands behave like new interpreters."""

import os
import signal

import pytest

from server.serve.children import StopSignals
from tests.support.service import forked


def test_a_signal_to_a_child_that_was_just_forked_does_not_reach_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = os.pipe()
    reset = forked._reset_signals

    def reset_late() -> None:
        os.read(ours, 1)  # until the signal was sent
        reset()

    monkeypatch.setattr(forked, "_reset_signals", reset_late)
    monkeypatch.setattr(forked, "_become", lambda *_arguments: 0)
    with StopSignals() as signals:
        child = forked._popen(
            (*forked.WIDEEP, "front"), env={}, pass_fds=(), process_group=0, preexec_fn=lambda: None
        )
        os.kill(child.pid, signal.SIGTERM)
        os.write(theirs, b"x")
        assert child.wait() == -signal.SIGTERM
        assert signals.take() == []
    os.close(ours)
    os.close(theirs)
