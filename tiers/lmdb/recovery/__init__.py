"""Reading a whole index at open, without LMDB, in one pass."""
