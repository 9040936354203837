"""Counters, metrics, and a log of the chunks that left the tiers. Imports nothing that decides."""
