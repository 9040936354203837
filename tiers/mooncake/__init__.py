"""Owns the tier over a Mooncake store.

Must not know folders and the local disk.
"""
