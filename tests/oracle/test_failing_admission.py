"""An admission policy that fails costs no request, and both tiers still store."""

from __future__ import annotations

from pathlib import Path

from policies.base import AdmissionPolicy, EntryInfo, Key
from tests.oracle.conditions import Conditions
from tests.oracle.models import MODELS
from tests.oracle.serving import OracleEngine
from tests.oracle.test_scheduler import live


class Failing(AdmissionPolicy):
    """Raises at every call."""

    def admit(self, key: Key, info: EntryInfo) -> bool:
        raise RuntimeError("on purpose")


def test_chunks_are_stored_in_both_tiers_after_a_fault(tmp_path: Path) -> None:
    failing = f"{__name__}:{Failing.__name__}"
    conditions = Conditions(
        cpu={"admission": failing}, tiers=({"capacity": "1MiB", "admission": failing},)
    )
    with OracleEngine(MODELS["full"], conditions, tmp_path, seed=0) as world:
        live(world)  # fails if a hook has failed
        assert world.loaded()["cpu"] > 0
        assert world.loaded()["file"] > 0
