"""Decides loads, stores and write-through, from the health and contents of the tiers. Pure."""
