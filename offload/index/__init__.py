"""Owns the chunks that one tier holds, their states, and the rules for eviction.

Must not know what other tiers hold, jobs, requests, or how bytes move.
"""
