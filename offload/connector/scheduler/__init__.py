"""Owns the connector on vLLM's scheduler thread.

Must not know files or tensors.
"""
