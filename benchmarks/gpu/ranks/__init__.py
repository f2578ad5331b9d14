"""Parts of the GPU day that run processes as ranks."""
