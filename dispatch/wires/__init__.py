"""The wires: one file per transport, and `choose.open_transport`, which picks."""
