"""Owns reading tier folders, even while a server uses them, and changing those that none uses.

Must not know namespaces, or the classes of a server's tiers.
"""
