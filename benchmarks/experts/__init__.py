"""Placement of experts: its quality, and the cost of moving and counting."""
