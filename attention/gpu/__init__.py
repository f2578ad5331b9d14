"""Attention on GPUs: Triton kernels. They are imported only if the device is a GPU, because triton is an extra."""
