"""What users and tests of DeepEP import from `deep_ep.utils`."""

from dispatch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
