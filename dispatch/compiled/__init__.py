"""Compiled code for every package above: what numba lacks, and threads that run programs of kernels."""
