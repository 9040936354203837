"""Owns reading ahead for requests that wait, and which of them wait until they are read.

Must not know stores, write-through, or which blocks of the GPU a load fills.
"""
