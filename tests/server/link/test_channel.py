"""The stream's settings: an idle service stays connected during any silence."""

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from server.link.messages import METHOD, OPTIONS, SERVICE, Abort, Welcome, decode, encode

FAST = (
    *(option for option in OPTIONS if option[0] != "grpc.keepalive_time_ms"),
    ("grpc.keepalive_time_ms", 50),
)


@pytest.mark.slow
def test_many_pings_without_a_message_between_them_do_not_end_the_stream() -> None:
    ended, leave = threading.Event(), threading.Event()

    def read_to_the_end(messages: Iterator[object], _context: grpc.ServicerContext) -> Iterator[object]:
        for _ in messages:
            pass
        ended.set()
        yield Welcome()

    server = grpc.server(futures.ThreadPoolExecutor(2), options=FAST)
    handler = grpc.stream_stream_rpc_method_handler(read_to_the_end, decode, encode)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    def say_something_and_wait() -> Iterator[object]:
        yield Abort("a")
        leave.wait(20)

    with grpc.insecure_channel(f"127.0.0.1:{port}", options=FAST) as channel:
        answers = channel.stream_stream(f"/{SERVICE}/{METHOD}", encode, decode)(say_something_and_wait())
        assert not ended.wait(8), "the stream ended over pings alone"  # gRPC spaces them by a second
        leave.set()
        assert len(list(answers)) == 1
    server.stop(0).wait(5)
