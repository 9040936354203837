"""Owns the reading of chunks that engines of another geometry have stored.

Must not know vLLM or the planner.
"""
