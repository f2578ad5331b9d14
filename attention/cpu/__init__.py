"""Kernels of attention for CPUs, and the register tiles that experts use too."""
