"""Owns the configuration: schema, options and checks against this machine.

Must not know a running server.
"""
