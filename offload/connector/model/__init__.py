"""Describes vLLM's model: layout, identity, geometry. Knows no request."""
