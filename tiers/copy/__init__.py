"""Owns copies between KV caches and slab slots, on the CPU and on CUDA.

Must not know keys, requests, or the meaning of the bytes in a page.
"""
