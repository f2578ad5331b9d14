"""The KV cache on GPUs. Nothing here is imported unless the device is a GPU: triton is an extra."""
