"""Owns threads, direct I/O and codecs that all disk tiers share.

Must not know where a tier keeps a record.
"""
