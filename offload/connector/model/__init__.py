"""Describes vLLM's model: layout, identity, geometry. Does not know requests."""
