"""Owns counters, metrics, and a log of the chunks that left the tiers.

Must not know the planner, policies or any other code that makes decisions.
"""
