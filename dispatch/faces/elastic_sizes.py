"""Sizes and domains of `ElasticBuffer`: arithmetic without a wire."""

from collections.abc import Hashable, Sequence

BUFFER_ALIGNMENT = 2 << 20  # DeepEP, csrc/kernels/backend/symmetric.hpp
_MOST_CHOICES = 32  # DeepEP's limit, taken where the number of choices is not given
_SCALE_CHANNELS = 32  # DeepEP counts a scale for so many, the finest it knows


def check_domains(num_ranks: int, node_size: int) -> tuple[int, int]:
    """Return the number of nodes and the ranks of one. Raises ValueError: nodes of that size do not make the group."""
    if node_size < 1 or num_ranks % node_size:
        allowed = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        raise ValueError(f"node_size is {node_size} for {num_ranks} ranks; it must be one of {allowed}")
    return num_ranks // node_size, node_size


def find_node_size(hosts: Sequence[Hashable]) -> int:
    """Return the ranks of a host, given every rank's; all of them where hosts do not hold equal blocks of ranks."""
    size = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), len(hosts))
    blocks = [hosts[first : first + size] for first in range(0, len(hosts), size)]
    is_regular = all(len(block) == size and len(set(block)) == 1 for block in blocks)
    return size if is_regular and len({block[0] for block in blocks}) == len(blocks) else len(hosts)


def buffer_bytes(num_ranks: int, max_tokens: int, hidden: int, num_topk: int, use_fp8: bool) -> int:
    """Return the bytes of the largest call's messages, sent and received, rounded up to BUFFER_ALIGNMENT."""
    choices = num_topk or _MOST_CHOICES
    row = hidden + 4 * -(-hidden // _SCALE_CHANNELS) if use_fp8 else 2 * hidden
    dispatch = row + choices * (8 + 4) + 4  # choices, weights, source token
    combine = 2 * hidden + 4 * choices
    return align_to_buffer(2 * num_ranks * max_tokens * max(dispatch, combine))


def align_to_buffer(num_bytes: int) -> int:
    """Round up to BUFFER_ALIGNMENT."""
    return -(-num_bytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
