"""The wires: one file per wire, and `open.open_wire`, which chooses one."""
