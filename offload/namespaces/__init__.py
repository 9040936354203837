"""Namespaces on disk: owners of folders, manifests, epochs, inventory. Does not know a running
server."""
