"""`Buffer(backend="deep_ep")`: the installed `deep_ep` package behind the same class.

Every call goes to the package's own `Buffer`. If DeepEP's assertions would not name the bad argument, its limits are
checked here first. Such an error is raised on this rank only, as DeepEP's are. Take buffer sizes and configs from the
package: its defaults are tuned, WideEP's are not. Tested with a stand-in only, never on hardware.
"""

import importlib
from types import ModuleType
from typing import Any

import torch.distributed as dist

from dispatch.errors import WireUnavailable
from dispatch.faces import checks
from dispatch.faces.config import NVL_PEERS, Config, check_buffer
from dispatch.faces.handles import split_rows
from dispatch.faces.rules import first_problem
from dispatch.faces.wires import check_group

_CONFIG_FIELDS = tuple(Config.__dataclass_fields__)


class InstalledCalls:
    """Mixin that precedes `Buffer`. `strict` is always on; `timeout_s` and `node_size` are the package's own.

    Raises:
        WireUnavailable: The package is not installed, cannot be loaded, or is WideEP's shim.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        *others: Any,
        comm: Any = None,
        backend: str = "deep_ep",
        strict: bool = True,
        timeout_s: float | None = None,
        node_size: int = NVL_PEERS,
        **names: Any,
    ) -> None:
        group = check_group(group, comm)
        self.rank, self.group, self.group_size = dist.get_rank(group), group, dist.get_world_size(group)
        check_buffer(self.group_size, num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self._package = load_package()
        sizes = (num_nvl_bytes, num_rdma_bytes, low_latency_mode)
        self._buffer = self._package.Buffer(group, *sizes, *others, **names)
        self._world = checks.World(rank=self.rank, num_ranks=self.group_size, strict=True)

    def __getattr__(self, name: str) -> Any:
        """Return attributes that this class does not set (`runtime`, ...) from the package's buffer."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._buffer, name)

    def dispatch(self, x: Any, *positional: Any, **named: Any) -> Any:
        rows, scales = split_rows(x)
        self._check(rows, scales)
        return self._buffer.dispatch(x, *positional, **self._with_config(named))

    def combine(self, x: Any, *positional: Any, **named: Any) -> Any:
        self._check(x, None)
        return self._buffer.combine(x, *positional, **self._with_config(named))

    def _check(self, rows: Any, scales: Any) -> None:
        problem = first_problem(checks.rows(rows, scales, self._world))
        if problem:
            raise ValueError(problem)

    def _with_config(self, named: dict[str, Any]) -> dict[str, Any]:
        """Convert a WideEP Config to the package's."""
        config = named.get("config")
        if not isinstance(config, Config):
            return named
        values = [getattr(config, field) for field in _CONFIG_FIELDS]
        return named | {"config": self._package.Config(*values)}


def _forward(name: str) -> Any:
    def call(self: InstalledCalls, *positional: Any, **named: Any) -> Any:
        return getattr(self._buffer, name)(*positional, **named)

    call.__name__, call.__doc__ = name, f"Call the package's `Buffer.{name}`."
    return call


for _name in (
    "destroy", "get_comm_stream", "get_local_buffer_tensor", "get_dispatch_layout", "clean_low_latency_buffer",
    "low_latency_dispatch", "low_latency_combine", "get_next_low_latency_combine_buffer",
    "low_latency_update_mask_buffer", "low_latency_query_mask_buffer", "low_latency_clean_mask_buffer",
):  # fmt: skip
    setattr(InstalledCalls, _name, _forward(_name))


def load_package() -> ModuleType:
    """Import the real `deep_ep`.

    Raises:
        WireUnavailable: The package or its libraries are missing, or it is WideEP's shim.
    """
    try:
        package = importlib.import_module("deep_ep")
    except (ImportError, OSError, AssertionError) as error:  # its import has assertions about NCCL
        raise WireUnavailable(
            f"backend is 'deep_ep', but importing deep_ep failed: {type(error).__name__}: {error}; "
            "build it from github.com/deepseek-ai/DeepEP, or use backend='auto'"
        ) from error
    if getattr(package, "is_wideep_shim", False):
        raise WireUnavailable(
            "backend is 'deep_ep', but the imported deep_ep is WideEP's own shim; "
            "remove its directory from PYTHONPATH, or use backend='auto'"
        )
    return package
