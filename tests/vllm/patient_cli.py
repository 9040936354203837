"""``kvtiers`` with the time limits of the tests in the configuration that ``kvtiers serve`` makes:
``python -m tests.vllm.patient_cli serve ...``. It has no flags for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.config import kv_transfer_config

if __name__ == "__main__":
    from offload.cli import main
    from tests.vllm.restored import PATIENT

    real = kv_transfer_config.transfer_config

    def patient(extra: Mapping[str, Any]) -> dict[str, Any]:
        return real({**extra, **PATIENT})

    kv_transfer_config.transfer_config = patient
    main()
