"""The GPU day, kernel by kernel: right, and how fast."""
