"""Benchmarks: each answers one question and ends in one JSON line."""
