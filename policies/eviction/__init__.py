"""Owns the built-in eviction policies, one per file.

Must not know tiers, memory, or the names in a configuration.
"""
