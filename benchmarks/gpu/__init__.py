"""A day with a GPU: what only a GPU can say about the kernels and the model path, in one resumable run."""
