"""The part of DeepEP's V1 `Buffer` that asks no peer: settings, configs, events, scratch memory. All local."""

from typing import Any

import torch
from torch import Tensor

from dispatch.errors import DispatchError
from dispatch.faces.config import Config
from dispatch.faces.events import EventHandle, EventOverlap
from dispatch.faces.runtime import scratch_like
from dispatch.faces.wires import Wires


class LocalCalls:
    """Mixed into `Buffer`."""

    num_sms: int = 20
    _wires: Wires

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Say whether FP8 rows can be sent: always."""
        return True

    @classmethod
    def set_num_sms(cls, new_num_sms: int) -> None:
        """Set `num_sms` for all buffers: kept and put into configs, of no other effect."""
        if new_num_sms < 0 or new_num_sms % 2 != 0:
            raise ValueError(f"new_num_sms is {new_num_sms}; it must be an even number, 0 or more")
        cls.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of the work so far: on the CPU it has happened."""
        return EventOverlap(EventHandle())

    @classmethod
    def get_dispatch_config(cls, num_ranks: int) -> Config:
        """Return a config for any number of ranks: ours have no effect, DeepEP's table is not repeated."""
        return cls._default_config(num_ranks)

    @classmethod
    def get_combine_config(cls, num_ranks: int) -> Config:
        """Return a config as `get_dispatch_config` does."""
        return cls._default_config(num_ranks)

    def get_comm_stream(self) -> Any:
        """Return the current CUDA stream: ours has none of its own. On the CPU there is none.

        Raises:
            DispatchError: the buffer is on the CPU.
        """
        device = self._wires.device
        if device.type != "cpu":
            return torch.cuda.current_stream(device)
        name = self._wires.wire.name
        raise DispatchError(
            f"get_comm_stream: backend {name} has no streams; a call's work is done when it returns"
        )

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Return new memory of the size that DeepEP's buffer would have, which nobody reads.

        Callers zero the buffer after a fault; ours needs no clearing, so that doing it is harmless.

        Args:
            dtype: of the tensor.
            size: shape; None: all elements from `offset` on, as one dimension.
            offset: elements to leave out in front.
            use_rdma_buffer: sized by num_rdma_bytes instead of num_nvl_bytes.
        """
        name = "num_rdma_bytes" if use_rdma_buffer else "num_nvl_bytes"
        num_bytes = getattr(self, name)
        return scratch_like(dtype, size, offset, name=name, num_bytes=num_bytes).to(self._wires.device)

    @classmethod
    def _default_config(cls, num_ranks: int) -> Config:
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
        return Config(cls.num_sms)
