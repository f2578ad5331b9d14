"""The placement of experts: its quality, and what moving and counting cost."""
