"""Owns reading and changing a tier's folder from other processes, even while a server uses it.

Must not know namespaces or the server's tier objects.
"""
