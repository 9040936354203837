"""Owns the built-in eviction policies, one per file.

Must not know tiers, memory, or the names under which policies are registered.
"""
