"""DeepEP's `Config`: chunk sizes of its normal kernels, and the buffer sizes that they need.

WideEP's backends have neither channels nor chunks. A Config is checked and stored, and the `deep_ep` backend passes it
on; otherwise it has no effect. The size hints use DeepEP's formulas (csrc/legacy/config.hpp at dd758ca), so sizes
computed here are large enough there.
"""

from dataclasses import dataclass

NVL_PEERS = 8  # DeepEP's ranks per node
_INT_BYTES, _FLOAT_BYTES, _TOPK_BYTES, _META_BYTES, _INT4_BYTES = 4, 4, 8, 8, 16
_MAX_TOPK = _MAX_SCALES = 128  # room in DeepEP's buffers, per token
_ALIGNMENT = 128
_TOKEN_BYTES = _META_BYTES + _MAX_TOPK * (_TOPK_BYTES + _FLOAT_BYTES) + _MAX_SCALES * _FLOAT_BYTES


@dataclass(frozen=True)
class Config:
    """Chunk sizes, as positional arguments or by DeepEP's names.

    Attributes:
        num_sms: Streaming multiprocessors for the kernels; two make a channel.
        num_max_nvl_chunked_send_tokens, num_max_nvl_chunked_recv_tokens: Tokens per NVLink send, and room for them.
        num_max_rdma_chunked_send_tokens: Tokens per RDMA send.
        num_max_rdma_chunked_recv_tokens: Room for them, rounded up to a multiple of the send.

    Raises:
        ValueError: DeepEP's kernels do not support a value.
    """

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms is {self.num_sms}; it must be 0 or more")
        nvl_send, nvl_recv = self.num_max_nvl_chunked_send_tokens, self.num_max_nvl_chunked_recv_tokens
        if not 0 < nvl_send < nvl_recv:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens is {nvl_send}; it must be at least 1 and less than "
                f"num_max_nvl_chunked_recv_tokens, which is {nvl_recv}"
            )
        rdma_send, rdma_recv = self.num_max_rdma_chunked_send_tokens, self.num_max_rdma_chunked_recv_tokens
        rounded = _round_up(rdma_recv, rdma_send) if rdma_send > 0 else 0
        if not 0 < 2 * rdma_send <= rounded:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens is {rdma_send}; it must be at least 1 and at most half of "
                f"num_max_rdma_chunked_recv_tokens, which is {rdma_recv}"
            )
        object.__setattr__(self, "num_max_rdma_chunked_recv_tokens", rounded)

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of NVLink buffer for rows of `hidden_bytes` over `num_ranks`."""
        _check_hint(hidden_bytes, num_ranks)
        num_nodes, local_ranks = max(num_ranks // NVL_PEERS, 1), min(num_ranks, NVL_PEERS)
        per_token = hidden_bytes + _TOKEN_BYTES
        queue = (2 * num_nodes + 3) * _INT_BYTES + self.num_max_nvl_chunked_recv_tokens * per_token
        return _round_up(self.num_sms // 2 * local_ranks * queue, _ALIGNMENT)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Return the bytes of RDMA buffer for rows of `hidden_bytes` over `num_ranks`; 0 within a node of 8 ranks."""
        _check_hint(hidden_bytes, num_ranks)
        if num_ranks <= NVL_PEERS:
            return 0
        per_token = hidden_bytes + _TOKEN_BYTES + _INT4_BYTES
        queue = (2 * NVL_PEERS + 2) * _INT_BYTES + self.num_max_rdma_chunked_recv_tokens * per_token
        return _round_up(self.num_sms // 2 * (num_ranks // NVL_PEERS) * 2 * queue, _ALIGNMENT)


def _check_hint(hidden_bytes: int, num_ranks: int) -> None:
    if hidden_bytes < 1:
        raise ValueError(f"hidden_bytes is {hidden_bytes}; it must be at least 1")
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


MAX_NODES = 20
BUFFER_ALIGNMENT = 128


def check_buffer(num_ranks: int, num_nvl_bytes: int, num_rdma_bytes: int, low_latency_mode: bool) -> None:
    """Raise ValueError if DeepEP does not support the group or the buffer sizes."""
    if num_ranks > NVL_PEERS and num_ranks % NVL_PEERS != 0:
        raise ValueError(
            f"group has {num_ranks} ranks; DeepEP supports up to {NVL_PEERS} or a multiple of {NVL_PEERS} (strict=True)"
        )
    if num_ranks > NVL_PEERS * MAX_NODES and not low_latency_mode:
        raise ValueError(
            f"group has {num_ranks} ranks; DeepEP's normal mode supports up to {NVL_PEERS * MAX_NODES} (strict=True)"
        )
    for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
        if size < 0 or size % BUFFER_ALIGNMENT != 0:
            raise ValueError(f"{name} is {size}; DeepEP needs a multiple of {BUFFER_ALIGNMENT} (strict=True)")
