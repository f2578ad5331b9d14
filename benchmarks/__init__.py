"""Benchmarks: each answers one question and ends with one JSON line."""
