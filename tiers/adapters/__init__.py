"""Owns tiers around other tiers: reopening, read-only, evicting.

Must not know the medium of the tier inside.
"""
