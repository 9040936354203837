"""Owns the decisions on loads, stores and write-through, from the health and contents of the tiers.

Must not know files, tensors, threads or a clock.
"""
