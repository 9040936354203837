"""Owns the offline operations behind the command line.

Must not know vLLM, the worker, or how results are printed.
"""
