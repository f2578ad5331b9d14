"""What published checkpoints do with Python code of their own, written here instead: such code is not run."""
