"""Owns the configuration: schema, options and checks against this machine.

Must not know requests, plans or vLLM's code.
"""
