"""Owns the reading of a whole index at open, without LMDB, in one pass.

Must not know the open tier, or the content of payloads.
"""
