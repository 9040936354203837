"""Owns reading and changing a tier's folder from other processes, also beside its server.

Must not know namespaces or the server's tier objects.
"""
