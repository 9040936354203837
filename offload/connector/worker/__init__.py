"""Owns the connector in a worker process of vLLM.

Must not know requests, or why something was planned.
"""
