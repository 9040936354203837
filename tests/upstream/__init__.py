"""vLLM's own tests, run against this project: see ``tests.upstream.__main__``."""
