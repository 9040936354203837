"""Threads, direct I/O and codecs that all disk tiers share."""
