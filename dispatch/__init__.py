"""All-to-all for experts: wires, the service's `Dispatcher`, and DeepEP's interfaces over the same wires.

    from dispatch import Buffer          # DeepEP's V1 interface

Names are imported on first use: the worker's supervisor imports this package and must not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dispatch.faces.buffer import Buffer
    from dispatch.faces.config import Config
    from dispatch.faces.elastic import ElasticBuffer
    from dispatch.faces.events import EventHandle, EventOverlap
    from dispatch.faces.handles import EPHandle

__all__ = ["Buffer", "Config", "EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap"]

_HOMES = {
    "Buffer": "dispatch.faces.buffer",
    "Config": "dispatch.faces.config",
    "EPHandle": "dispatch.faces.handles",
    "ElasticBuffer": "dispatch.faces.elastic",
    "EventHandle": "dispatch.faces.events",
    "EventOverlap": "dispatch.faces.events",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
