"""Tiny random-weight models of every family, created on disk by the tests themselves."""
