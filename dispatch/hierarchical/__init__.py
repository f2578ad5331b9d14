"""Node-limited dispatch: a token crosses to another node once, then spreads inside it."""
