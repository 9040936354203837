"""Reads chunks that engines of another geometry have stored. Does not know vLLM."""
