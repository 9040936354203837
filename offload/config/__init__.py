"""What a user configures: schema, options, checks against this machine. Knows no running server."""
