"""A tier's folder: ownership, epochs, opening and closing."""
