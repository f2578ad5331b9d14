import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from scheduler.policy.config import EngineConfig
from server.link.rank_link import RankLink
from server.process import engine as engine_link
from server.process.engine import FRONT_IS_GONE, make_link

FRONT = {"ranks_address": "127.0.0.1:1", "token": "t"}


class EndedError(Exception):
    """Stands for the process' end."""


def link_of(monkeypatch: pytest.MonkeyPatch, *, front_answers: bool) -> RankLink:
    """A link whose loss ends in an exception instead of the process' end."""

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(engine_link, "front_answers", lambda _address: front_answers)
    step = SimpleNamespace(block_tokens=16)
    built: Any = Mock(max_model_len=64, num_blocks=8, runner=SimpleNamespace(step=step))
    return make_link(
        built,
        EngineConfig(directory=Path(), kv_cache_bytes=1, rank=2, world_size=3),
        FRONT,
        {"WIDEEP_RESTARTS": "1", "WIDEEP_RESTARTABLE_IN_S": "4.5"},
    )


@pytest.mark.parametrize(("front_answers", "status"), [(True, 1), (False, FRONT_IS_GONE)])
def test_a_lost_stream_ends_the_engine_and_says_whether_there_is_a_front_to_come_back_to(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    front_answers: bool,
    status: int,
) -> None:
    link = link_of(monkeypatch, front_answers=front_answers)
    with pytest.raises(EndedError) as ended:
        link._listener.lost("the front closed the stream")
    assert ended.value.args == (status,)
    assert capsys.readouterr().err == "rank 2: the front closed the stream\n"


def test_the_front_is_told_how_often_an_engine_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = link_of(monkeypatch, front_answers=True)._facts
    assert (facts.rank, facts.world_size, facts.num_restarts, facts.restartable_in_s) == (2, 3, 1, 4.5)
