"""The MoE layer's kernels for GPUs, in Triton. They are imported only if a GPU path is chosen."""
