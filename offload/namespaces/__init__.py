"""Owns namespaces on disk: owners of folders, manifests, epochs, inventory.

Must not know requests, plans or jobs.
"""
