"""Real ``vllm serve`` processes for tests: the demo's server with one call for log-probabilities.

``kill()`` sends SIGKILL to the whole process group; ``stop()`` is an operator's SIGTERM. The server
class reads ``/metrics`` and empties prefix caches over HTTP; all waits have deadlines.
"""

from __future__ import annotations

from collections.abc import Sequence

from demo.server import ServerError, VllmServer
from tests.vllm.protocol import Generation

__all__ = ["Server", "ServerError"]

FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--kv-cache-memory-bytes=8388608",
    "--max-model-len=2048",
    "--max-num-batched-tokens=512",
)


class Server(VllmServer):
    """A server that also answers with log-probabilities, as ``engine.Engine`` does."""

    def generate_one(self, prompt: Sequence[int], max_tokens: int = 8) -> Generation:
        """The greedy answer to one prompt of token ids."""
        choice = self.complete(prompt, max_tokens, logprobs=5, return_tokens_as_token_ids=True)
        logprobs = tuple(
            tuple(sorted((int(name.removeprefix("token_id:")), p) for name, p in top.items()))
            for top in choice["logprobs"]["top_logprobs"]
        )
        return Generation(tuple(choice["token_ids"]), logprobs, 0, choice["finish_reason"])
