"""Events and configs keep DeepEP's contract on the CPU."""

import pytest

from dispatch import Config, EventHandle, EventOverlap
from dispatch.faces.events import finished


def test_a_hook_runs_once_after_the_wait() -> None:
    calls: list[int] = []
    event = EventOverlap(EventHandle())
    event.register_hook_after_wait(lambda: calls.append(1))
    with pytest.raises(ValueError, match="takes one at a time"):
        event.register_hook_after_wait(lambda: None)
    event.current_stream_wait()
    event.current_stream_wait()
    assert calls == [1]


def test_leaving_a_with_block_waits_and_may_release() -> None:
    calls: list[int] = []
    event = EventOverlap(EventHandle(), (1, 2))
    event.register_hook_after_wait(lambda: calls.append(1))
    with event:
        assert calls == []
    assert calls == [1] and event.event is not None and event.extra_tensors == (1, 2)
    with event(release_handle=True):
        pass
    assert event.event is None
    with event:  # nothing to wait for, which is no error here
        pass


def test_only_an_asynchronous_call_has_an_event() -> None:
    assert finished(True).event is not None
    assert finished(False).event is None


def test_configs_take_deep_eps_names_and_order() -> None:
    config = Config(24, 8, 512, 16, 130)
    assert config == Config(
        num_sms=24,
        num_max_nvl_chunked_send_tokens=8,
        num_max_nvl_chunked_recv_tokens=512,
        num_max_rdma_chunked_send_tokens=16,
        num_max_rdma_chunked_recv_tokens=144,
    )
    assert config.num_max_rdma_chunked_recv_tokens == 144  # a multiple of the send


def test_hints_count_every_byte_of_every_channel() -> None:
    """By hand: 12 channels; a token is 4096 bytes, 8 of meta, 128 choices and weights, 128 scales."""
    config, token = Config(24, 8, 256, 16, 128), 4096 + 8 + 128 * 12 + 128 * 4
    nvl = 12 * 4 * (5 * 4 + 256 * token)
    assert config.get_nvl_buffer_size_hint(4096, 4) == -(-nvl // 128) * 128
    assert config.get_rdma_buffer_size_hint(4096, 8) == 0
    rdma = 12 * 2 * 2 * (18 * 4 + 128 * (token + 16))
    assert config.get_rdma_buffer_size_hint(4096, 16) == -(-rdma // 128) * 128
    assert config.get_nvl_buffer_size_hint(4096, 16) == -(-(12 * 8 * (7 * 4 + 256 * token)) // 128) * 128
