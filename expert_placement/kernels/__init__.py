"""Compiled loops of the planner: plain arrays in and out, one layer at a time, no Python objects."""
