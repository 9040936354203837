"""Owns a tier of one file per record, for one engine or shared.

Must not know what a payload means, or which chunks are worth keeping.
"""
