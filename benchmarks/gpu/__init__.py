"""A day with a GPU: measurements of the kernels and the model path that need a GPU, in one resumable run."""
