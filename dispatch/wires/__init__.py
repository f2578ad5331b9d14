"""The wires: one file per wire, and `choose.open_wire`, which picks."""
