"""The MoE layer's kernels for GPUs, in Triton. Nothing here is imported where no GPU path is chosen."""
