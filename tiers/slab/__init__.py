"""Owns pinned host memory for slots.

Must not know what a slot contains.
"""
