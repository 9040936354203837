"""The exclusive LMDB tier: an index in LMDB, payloads in a file of extents beside it."""
