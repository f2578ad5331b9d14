"""What `moe.load_counts` keeps, on a GPU: counted where the choices are, copied to the host when somebody asks."""

import numpy as np
import torch

from moe.load_counts import NUM_PHASES, LayerCounts, LoadCounts


class DeviceLayerCounts(LayerCounts):
    """One layer's counters.

    Attributes:
        device_table: [2, E + R] int64, added to by `choose.DeviceRoute`.
        experts_ns: stays 0: the host does not wait for the device to know.
    """

    def __init__(
        self, table: np.ndarray, num_experts: int, slots_per_rank: int, device_table: torch.Tensor
    ) -> None:
        super().__init__(table, num_experts, slots_per_rank)
        self.device_table = device_table

    @property
    def expert_E(self) -> np.ndarray:
        """Tokens of each expert so far, both phases: [E] int64. Waits for the device."""
        result: np.ndarray = self.device_table.cpu().numpy()[:, : self._num_experts].sum(axis=0)
        return result


class DeviceLoadCounts(LoadCounts):
    """One rank's counters of all MoE layers."""

    def __init__(
        self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int, device: torch.device
    ) -> None:
        shape = (num_layers, NUM_PHASES, num_experts + num_ranks)
        self._device_table = torch.zeros(shape, dtype=torch.int64, device=device)
        on_host = np.zeros(shape, dtype=np.int64)
        self.layers = [
            DeviceLayerCounts(host, num_experts, slots_per_rank, own)
            for host, own in zip(on_host, self._device_table, strict=True)
        ]

    @property
    def table(self) -> np.ndarray:  # type: ignore[override]
        """[L, 2, E + R] int64, a copy. Waits for the device."""
        result: np.ndarray = self._device_table.cpu().numpy()
        return result

    def clear(self) -> None:
        """Forget what was counted before the first step."""
        self._device_table.zero_()
