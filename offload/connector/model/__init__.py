"""What vLLM says of a model: layout, identity, geometry. Knows no request."""
