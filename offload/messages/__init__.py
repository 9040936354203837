"""Owns plans and reports: plain values that travel between processes.

Must not know who makes them and who carries them out.
"""
