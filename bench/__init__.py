"""Benchmarks, one module per question: ``python -m bench --help``. They run from a checkout."""
