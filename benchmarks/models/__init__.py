"""Checkpoints that benchmarks create for themselves."""
