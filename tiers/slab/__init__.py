"""Pinned host memory for slots."""
