"""Products of rows with weights: grouped by expert, in FP8, and of linear layers."""
