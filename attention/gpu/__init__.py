"""Attention on GPUs: Triton kernels. Nothing here is imported unless the device is a GPU: triton is an extra."""
