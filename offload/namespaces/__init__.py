"""Who owns a folder, manifests, epochs and the inventory of stores. Knows no running server."""
