"""What is known of one request: lookup, state, miss reason, records."""
