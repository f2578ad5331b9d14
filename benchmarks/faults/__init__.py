"""Engines that are killed, hang and return under load: `python -m benchmarks.faults`."""
