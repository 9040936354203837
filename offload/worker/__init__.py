"""Owns the execution of plans on one rank, and the tiers that it opens, with asyncio.

Must not know indexes, policies, or more of a request than its name.
"""
