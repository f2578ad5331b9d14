"""The parts of the GPU day whose processes act as ranks."""
