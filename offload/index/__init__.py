"""The chunks that one tier holds, their states, and the rules for eviction. Pure."""
