"""The cost of a model on a device: memory, the time of a step, latency and throughput under a load."""
