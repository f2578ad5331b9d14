"""The demo model: a small, fluent Mixture-of-Experts, made once on the user's machine.

Importing this package takes milliseconds: only the child process that makes the model imports torch and
transformers, never the caller.
"""

from moe.demo_model.cache import demo_model_path, ensure_demo_model
from moe.demo_model.source import DemoModelError, DemoSourceError

__all__ = ["DemoModelError", "DemoSourceError", "demo_model_path", "ensure_demo_model"]
