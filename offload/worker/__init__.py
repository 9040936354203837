"""Owns the execution of plans on one rank, and the tiers that it opens, with asyncio.

Must not know requests, prompts, or why something was planned.
"""
