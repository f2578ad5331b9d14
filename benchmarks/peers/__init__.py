"""Other servers, each in an environment of its own, beside ours on the same checkpoint: `python -m benchmarks.peers`."""
