"""Tiers around other tiers: reopening, read-only, evicting."""
