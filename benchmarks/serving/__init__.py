"""What benchmarks of the service share: the service, what it is compared with, and who asks."""
