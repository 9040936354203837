"""Owns the chunks that one tier holds, their states, and the rules for eviction.

Must not know jobs, how bytes move, or of a request more than the origin and options of its chunks.
"""
