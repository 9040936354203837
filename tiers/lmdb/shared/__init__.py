"""Owns the LMDB tier that several engines of one host share.

Must not know the state of the index from one transaction to the next.
"""
