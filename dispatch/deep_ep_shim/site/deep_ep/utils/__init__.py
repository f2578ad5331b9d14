"""Names that users of DeepEP import from `deep_ep.utils`.

Modules that only DeepEP's own tests use (gate, refs, testing, ...) are rewritten in WideEP's tests and loaded from there.
"""

from pathlib import Path

from dispatch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
__path__ += [str(Path(__file__).resolve().parents[5] / "tests" / "dispatch" / "faces" / "deep_ep_utils")]
