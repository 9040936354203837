"""Owns the description of vLLM's model: layout, identity and geometry.

Must not know requests.
"""
