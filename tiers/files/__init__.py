"""Owns a tier of one file per record, for one engine or shared.

Must not know what a payload means. Of a record's use it knows only the last time.
"""
