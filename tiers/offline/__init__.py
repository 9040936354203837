"""Owns the folders of tiers without a server: reading, exporting, importing and removing records.

Must not know namespaces, or a tier that is open.
"""
