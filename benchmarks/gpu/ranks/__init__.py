"""The GPU day, by processes that serve as ranks."""
