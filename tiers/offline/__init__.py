"""The folders of tiers without a server: reading, exporting, importing and removing records."""
