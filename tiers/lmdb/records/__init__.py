"""Owns the records of an index in memory: their values, by key, in little space.

Must not know LMDB, files, or the content of payloads.
"""
