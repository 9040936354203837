"""Settings for every test. The models and engines are in ``tests/models`` and ``tests/vllm``."""

from __future__ import annotations

import faulthandler
import sys

# A test that hangs below Python (a copy, LMDB) still shows where, also with output captured.
faulthandler.enable(file=sys.__stderr__)
