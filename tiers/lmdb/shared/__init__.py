"""The LMDB tier that several engines of one host share."""
