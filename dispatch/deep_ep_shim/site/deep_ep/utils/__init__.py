"""What users of DeepEP import from `deep_ep.utils`.

What only DeepEP's own tests use (gate, refs, testing, ...) is written anew in WideEP's tests, and found where these are.
"""

from pathlib import Path

from dispatch import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
__path__ += [str(Path(__file__).resolve().parents[5] / "tests" / "dispatch" / "faces" / "deep_ep_utils")]
