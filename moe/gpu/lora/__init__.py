"""LoRA adapters on GPUs: kernels, tables, and the rows of a step by adapter."""
