"""Stores without a server: reading, exporting, importing, removing."""
