"""DeepEP's events under their old address."""

from dispatch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
