"""Owns the description of vLLM's model: layout, identity and geometry.

Must not know more of a request than its name and its LoRA adapter.
"""
