"""DeepEP's events under their old module name."""

from dispatch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
