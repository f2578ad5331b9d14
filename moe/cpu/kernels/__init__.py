"""Kernels for experts, linear layers and routing, and the panels of weights that they read."""
