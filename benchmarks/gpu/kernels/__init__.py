"""The GPU day, kernel by kernel: correctness and times."""
