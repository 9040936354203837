"""Eviction and admission policies: they order keys and never own memory."""
