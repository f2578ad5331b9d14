"""Compiled loops of the optimizer: plain arrays in and out, one layer at a time, no Python objects."""
