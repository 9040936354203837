"""KV offloading for vLLM: what to keep, where it is, and how it comes back."""
