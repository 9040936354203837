"""The connector on vLLM's scheduler thread. Touches neither files nor tensors."""
