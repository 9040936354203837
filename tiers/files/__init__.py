"""Owns a tier of one file per record, for one engine or shared.

Must not know what a payload means, or more of a record's use than when it was last.
"""
