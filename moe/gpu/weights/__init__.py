"""Experts' weights in a GPU's memory: storage formats, and slots."""
