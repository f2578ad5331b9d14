"""Weights in a CPU's memory: of experts by slot, and of all other modules."""
