"""Code shared by benchmarks of the service: the service, its peers, and clients."""
