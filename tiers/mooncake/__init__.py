"""The tier over a Mooncake store."""
