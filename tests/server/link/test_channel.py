"""The stream's settings: an idle service stays connected, however long nothing is said."""

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from server.link import ranks_pb2 as pb
from server.link.channel import OPTIONS
from server.link.ranks_pb2_grpc import FrontServicer, FrontStub, add_FrontServicer_to_server

FAST = (
    *(option for option in OPTIONS if option[0] != "grpc.keepalive_time_ms"),
    ("grpc.keepalive_time_ms", 50),
)


class SilentFront(FrontServicer):  # type: ignore[misc]
    """Takes a rank and says nothing."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def Attach(self, messages: Iterator[pb.FromRank], context: grpc.ServicerContext) -> Iterator[pb.ToRank]:
        """Read until the stream ends."""
        for _ in messages:
            pass
        self.ended.set()
        yield pb.ToRank()


@pytest.mark.slow
def test_many_pings_without_a_message_between_them_do_not_end_the_stream() -> None:
    front, leave = SilentFront(), threading.Event()
    server = grpc.server(futures.ThreadPoolExecutor(2), options=FAST)
    add_FrontServicer_to_server(front, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def say_hello_and_wait() -> Iterator[pb.FromRank]:
        yield pb.FromRank()
        leave.wait(20)

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=FAST) as channel:
        answers = FrontStub(channel).Attach(say_hello_and_wait())
        assert not front.ended.wait(8), "the stream ended over pings alone"  # gRPC spaces them by a second
        leave.set()
        assert len(list(answers)) == 1
    server.stop(0).wait(5)
