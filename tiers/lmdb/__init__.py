"""Owns the exclusive LMDB tier: an index in LMDB, payloads in a file of extents beside it.

Must not know other processes: they may read the folder, but not write to it.
"""
