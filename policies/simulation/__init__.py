"""Owns traces and the simulator behind `kvtiers simulate`.

Must not know real tiers or a running server.
"""
