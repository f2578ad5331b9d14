"""Dispatch between device tensors, for services with models on GPUs. Needs Triton."""
