"""Owns a tier of one file per record, for one engine or shared.

Must not know what a payload means, or more about a record's use than the time of the last one.
"""
