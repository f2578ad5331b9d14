"""Checkpoints that benchmarks make for themselves."""
