"""Counters, metrics and what left the tiers. Imports nothing that decides."""
