"""The configuration: schema, options and checks against this machine. Does not know a running
server."""
