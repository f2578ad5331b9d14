"""The part of `ElasticBuffer` that asks no peer after it is made: domains of ranks, sizes, events. All local then."""

from typing import Any, NoReturn

import torch.distributed as dist

from dispatch.errors import DispatchError
from dispatch.faces.elastic_sizes import buffer_bytes, check_domains, find_node_size
from dispatch.faces.events import EventHandle
from dispatch.wires.segment import identify_process

NUM_SMS = 4  # the smallest number that DeepEP takes; ours uses none


class ElasticDomains:
    """Mixed into `ElasticBuffer`, which documents the attributes."""

    def _set_domains(
        self, group: dist.ProcessGroup, node_size: int | None, allow_hybrid_mode: bool, num_allocated_qps: int
    ) -> None:
        """Find this rank's place. Collective if `node_size` is None."""
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        size = _ranks_of_a_host(group) if node_size is None else node_size
        self.num_rdma_ranks, self.num_nvlink_ranks = check_domains(self.num_ranks, size)
        self.allow_hybrid_mode = allow_hybrid_mode
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_allocated_qps = num_allocated_qps or (65 if allow_hybrid_mode else 17)

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return the bytes that the messages of the largest call can take, rounded up to 2 MiB. Local.

        Of no effect on the CPU, where memory grows as needed, and not DeepEP's number.
        """
        return buffer_bytes(group.size(), num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of the work so far: on the CPU it has happened. Local."""
        return EventHandle()

    def get_comm_stream(self) -> NoReturn:
        """Raise DispatchError: the CPU has no streams, all work is done when a call returns. Local."""
        raise DispatchError("get_comm_stream: the CPU has no streams; a call's work is done when it returns")

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes and the ranks of a node. Local."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the same with hybrid mode, (1, all ranks) without. Local."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """Return the smallest number DeepEP gives: there are no SMs here to reckon with. Local."""
        return NUM_SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Return DeepEP's number for `num_sms`; nothing depends on it here. Local."""
        wanted = num_sms * 16 + 1 if self.allow_hybrid_mode else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)


def _ranks_of_a_host(group: dist.ProcessGroup) -> int:
    """Collective over `group`."""
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, identify_process().host, group=group)
    return find_node_size(hosts)
