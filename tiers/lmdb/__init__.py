"""Owns the exclusive LMDB tier: an index in LMDB, payloads in a file of extents beside it.

Must not know other processes that use the folder: there are none.
"""
