"""Benchmarks of cached state that is kept, moved and shared."""
