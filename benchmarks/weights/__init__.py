"""Checkpoints as files: how fast they load, and what quantising costs."""
