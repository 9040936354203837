"""Owns the check that a version of vLLM has everything that this package uses of vLLM.

Must not know requests, blocks or tiers.

    python -m offload.connector.contract WHEEL

The check reads source text only: it imports neither vLLM nor the rest of this package. `uses`
derives the used names from this project's source, `declared` lists what cannot be derived,
`library` answers from vLLM's source, `snapshots` holds the answers of the versions that were
tested, and `compare` lists what would break.
"""
