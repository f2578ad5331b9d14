"""Dispatch between device tensors: what the service uses where its model lives on GPUs. Needs Triton."""
