"""The state of one request: its lookup, progress, miss reason and record."""
