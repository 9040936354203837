"""The configuration: schema, options and checks against this machine. Knows no running server."""
