"""Owns reading chunks ahead for requests that wait, and the choice of requests that wait for it.

Must not know stores, write-through, or which blocks of the GPU a load fills.
"""
