"""The LMDB tier: an index in LMDB, payloads in extents beside it."""
