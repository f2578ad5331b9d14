"""Dispatch with shapes that never change: DeepEP's low-latency mode."""
