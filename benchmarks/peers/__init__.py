"""Other servers, each in a separate environment, compared with ours on the same checkpoint: `python -m benchmarks.peers`."""
