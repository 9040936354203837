"""The connector on vLLM's scheduler thread. Touches no file and no tensor."""
