"""Offline operations behind the command line. Does not know vLLM or the worker."""
