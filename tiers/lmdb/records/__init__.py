"""Owns the compact copy of an index in memory: the values of its records, by key.

Must not know LMDB, files, or the content of payloads.
"""
