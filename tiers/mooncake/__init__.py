"""Owns the tier over a Mooncake store.

Must not know folders or the local disk.
"""
