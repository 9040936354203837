"""Offline operations behind the command line. Knows no vLLM and no worker."""
