"""Engines that are killed, hang and come back under load: `python -m benchmarks.faults`."""
