"""Owns plans and reports: plain values that travel between processes.

Must not know who creates plans and reports, or who carries them out.
"""
