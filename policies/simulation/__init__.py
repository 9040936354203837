"""Owns traces and the simulator behind `kvtiers simulate`.

Must not know tiers or a running server.
"""
