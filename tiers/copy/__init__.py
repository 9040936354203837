"""Owns copies between KV caches and slab slots, on the CPU and on CUDA.

Must not know keys, jobs, or what a slot contains.
"""
