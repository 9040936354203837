"""Reading chunks that engines of another geometry have stored. Knows no vLLM."""
