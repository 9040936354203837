"""Groups, keys and prefix matching; the addresses of tensors. Only registration imports torch."""
