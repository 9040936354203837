"""Owns the chunks that one tier holds, their states, and the rules for eviction.

Must not know other tiers, jobs, or how bytes move.
"""
