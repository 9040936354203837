"""The connector in a worker process of vLLM."""
