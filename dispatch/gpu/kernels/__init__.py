"""Triton kernels of dispatch: send, wait, order, deliver, answer and sum."""
