import os

import pytest

from server.serve.child_messages import MessagePipe, SupervisorPipe


def test_messages_are_whole_lines() -> None:
    pipe = MessagePipe()
    assert pipe.read() == []
    os.write(pipe.child_fd, b'{"a": 1}\n{"b"')
    assert pipe.read() == [{"a": 1}]
    os.write(pipe.child_fd, b": 2}\n")
    assert pipe.read() == [{"b": 2}]
    assert not pipe.at_end
    pipe.close_child_end()
    assert pipe.read() == []
    assert pipe.at_end
    pipe.close()


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n"])
def test_messages_that_are_no_objects_are_an_error(line: bytes) -> None:
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
        pipe.tell_if_read(beat=beat)
    assert os.read(read_fd, 1 << 20).startswith(b'{"beat": 0}\n')
    pipe.tell_if_read(beat=-1)
    assert os.read(read_fd, 1 << 20).endswith(b'{"beat": -1}\n')
    os.close(read_fd)
    os.close(write_fd)
