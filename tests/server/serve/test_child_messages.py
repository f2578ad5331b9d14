import os
from pathlib import Path
from typing import get_args

import pytest

from server.serve.child_messages import (
    Beat,
    CacheBytes,
    FromChild,
    FrontAddresses,
    Leaving,
    MessagePipe,
    Ready,
    ServiceUrl,
    SupervisorPipe,
    SupervisorState,
    decode,
    encode,
)

MESSAGES: list[FromChild] = [
    FrontAddresses("http://127.0.0.1:8000", "127.0.0.1:9", "secret"),
    ServiceUrl("http://127.0.0.1:8000"),
    CacheBytes(1 << 40),
    Ready(),
    Beat(7),
    Leaving(),
]


def test_every_message_is_read_as_it_was_written() -> None:
    assert [decode(encode(message)) for message in MESSAGES] == MESSAGES
    assert {type(decode(encode(message))) for message in MESSAGES} == set(get_args(FromChild))


def test_a_replacement_reads_the_state_that_its_predecessor_wrote(tmp_path: Path) -> None:
    for state in (SupervisorState(8000, None, "", 0), SupervisorState(1, 2, '{"http": "x"}', 3)):
        state.write(tmp_path / "state.json")
        assert SupervisorState.read(tmp_path / "state.json") == state
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_messages_are_whole_lines() -> None:
    pipe = MessagePipe()
    assert pipe.read() == []
    os.write(pipe.child_fd, b'{"beat": 1}\n{"beat"')
    assert pipe.read() == [Beat(1)]
    os.write(pipe.child_fd, b": 2}\n")
    assert pipe.read() == [Beat(2)]
    assert not pipe.at_end
    pipe.close_child_end()
    assert pipe.read() == []
    assert pipe.at_end
    pipe.close()


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"[1]\n",
        b'{"unknown": 1}\n',
        b'{"beat": "1"}\n',
        b'{"beat": 1, "ready": true}\n',
        b"\xff\n",
    ],
)
def test_lines_that_are_no_messages_are_an_error(line: bytes) -> None:
    pipe = MessagePipe()
    os.write(pipe.child_fd, line)
    with pytest.raises(ValueError):
        pipe.read()
    pipe.close_child_end()
    pipe.close()


def test_a_supervisor_that_does_not_read_keeps_no_heartbeat_waiting() -> None:
    read_fd, write_fd = os.pipe()
    pipe = SupervisorPipe({"WIDEEP_READY_FD": str(write_fd)})
    for beat in range(20_000):  # more than the pipe holds
        pipe.send_if_read(Beat(beat))
    assert os.read(read_fd, 1 << 20).startswith(b'{"beat": 0}\n')
    pipe.send_if_read(Beat(-1))
    assert os.read(read_fd, 1 << 20).endswith(b'{"beat": -1}\n')
    os.close(read_fd)
    os.close(write_fd)
