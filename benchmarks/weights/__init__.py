"""Checkpoints as files: how fast they load, and the cost of quantisation."""
