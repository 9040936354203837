"""Carries out plans on one rank, and opens its tiers, with asyncio."""
