"""A Mooncake master that is there and does not answer: every call ends, and none says "absent"."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.tiers.mooncake_world import Master, skip_without_mooncake
from tiers.base import TierIoError
from tiers.mooncake_client import MooncakeClient
from tiers.record import Identity
from tiers.testing import key_of

skip_without_mooncake()


def test_a_master_that_hangs_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "300")
    data = [np.zeros(4096, np.uint8)]
    with Master(tmp_path / "log") as master:
        start = data[0].ctypes.data
        memory = range(start, start + data[0].nbytes)
        client = MooncakeClient(master.settings(32 << 20), Identity(), memory, 1)
        client.put([key_of(0)], 0, data)
        master.stop()
        with pytest.raises(TierIoError, match="does not answer"):
            client.present([key_of(0)], 0)
        with pytest.raises(TierIoError, match="does not answer"):
            client.put([key_of(1)], 0, data)
        with pytest.raises(TierIoError, match="does not answer"):
            client.get([key_of(0)], 0, data)
        with pytest.raises(TierIoError, match="does not answer"):
            client.remove([key_of(0)], 0)
        client.close()  # which would stop every thread of the process for 90 s, were it tried
        master.resume()
        client._store.close()  # now, not at the end of the process
