"""Owns the state of one request: its options, lookup, progress, miss reason and record.

Must not know workers, tensors, or how bytes move.
"""
