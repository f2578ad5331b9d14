"""The scheduler's part of the GPU path. Nothing here is imported where no GPU path is chosen."""
