"""Owns the LMDB tier that several engines of one host share.

Must not know the state of the index between transactions: other engines change it.
"""
