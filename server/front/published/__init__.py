"""Replacements for the Python code in published checkpoints, which is never run."""
