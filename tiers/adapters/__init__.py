"""Tiers around tiers: reopening, read-only, evicting."""
