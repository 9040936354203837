"""The vLLM connector: the only place of this project that imports vllm."""
