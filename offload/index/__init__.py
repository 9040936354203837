"""Owns the chunks that one tier holds, their states, and the rules for eviction.

Must not know jobs, how bytes move, or more of a request than the origin and options of its chunks.
"""
