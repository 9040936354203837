"""Owns counters, metrics, and a log of the chunks that left the tiers.

Must not know anything that decides.
"""
