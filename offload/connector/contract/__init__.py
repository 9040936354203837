"""Owns the comparison of the parts of vLLM that this package uses with what a version has.

Must not know requests, blocks or tiers; it reads source text and does not import vLLM.

    python -m offload.connector.contract WHEEL

The comparison reads source text only: neither vLLM nor the rest of this package is imported. `uses`
derives the used names from this project's source, `declared` lists what cannot be derived,
`library` answers from vLLM's source, `snapshots` holds the answers of the versions that were
tested, and `compare` lists what would break.
"""
