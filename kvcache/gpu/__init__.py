"""The KV cache on GPUs. Imported only if the device is a GPU, because triton is an optional dependency."""
