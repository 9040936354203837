"""Groups, keys and prefix matching; where tensors lie. Only registration imports torch."""
