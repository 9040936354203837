"""Owns the exclusive LMDB tier: an index in LMDB, payloads in a file of extents beside it.

Must not know other processes: none of them uses the folder.
"""
