"""Owns a tier's folder: ownership, epochs, opening and closing.

Must not know records and their format.
"""
