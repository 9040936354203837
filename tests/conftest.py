"""Settings for every test. The models are in ``tests/models``, the engines in ``tests/vllm``."""

from __future__ import annotations

import contextlib

# The GPU tests run on machines that have little more than torch.
with contextlib.suppress(ImportError):
    import hypothesis

    # No time limits for single examples: machines are busy. The blob repeats a failure anywhere.
    hypothesis.settings.register_profile("kvtiers", deadline=None, print_blob=True)
    hypothesis.settings.load_profile("kvtiers")
