"""Namespaces on disk: owners of folders, manifests, epochs, inventory. Knows no running server."""
