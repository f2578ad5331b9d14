"""Layers, steps and whole models as programs of kernels, which run without the interpreter."""
