"""Owns the connector in a worker process of vLLM.

Must not know indexes, policies, or more of a request than its name.
"""
