"""Owns groups, keys and prefix matching, and the addresses of tensors.

Must not know what a tier holds; only registration knows torch.
"""
