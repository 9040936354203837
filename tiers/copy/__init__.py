"""Copies between KV caches and slab slots, on the CPU and on CUDA."""
