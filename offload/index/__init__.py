"""Which chunks one tier holds, their states, and what must not be evicted. Pure."""
