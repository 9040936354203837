"""Tiny random-weight models of every family, made on disk by the tests themselves."""
