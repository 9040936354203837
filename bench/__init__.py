"""Benchmarks, one module per question: ``python -m bench --help``. Runs from a checkout."""
