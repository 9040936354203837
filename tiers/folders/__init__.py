"""Owns a tier's folder: ownership, epochs, opening and closing.

Must not know records or their format.
"""
