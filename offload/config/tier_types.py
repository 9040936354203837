"""The types of tiers that a configuration may name, with the options that only one type has.

``offload.worker.tier_factory`` creates a tier of each type.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from offload.config.fields import REQUIRED, Field, address, choice, flag, number, size, text
from offload.config.options import TIER_FIELDS


@dataclass(frozen=True, slots=True)
class NeededPackage:
    """A package that kvtiers does not install by itself. ``module`` is what the tier imports,
    ``requirement`` what pip installs. ``guide`` describes what else must be installed."""

    name: str
    module: str
    requirement: str
    guide: str

    def why_unusable(self) -> str:
        """Return why the module cannot be imported here, or "" if it can. Loads its libraries."""
        try:
            importlib.import_module(self.module)
        except ImportError as error:  # the package or a system library may be missing
            return str(error)
        return ""


@dataclass(frozen=True, slots=True)
class TierType:
    """A type of tier that a configuration may name.

    ``fields`` are options of this type, in addition to ``TIER_FIELDS``. ``needs_local_disk``
    refuses network file systems. ``shared`` means that other engines also write to every tier of
    this type; otherwise the option ``shared`` decides. ``without`` names the ``TIER_FIELDS`` that
    do not apply. ``io_threads`` is the default of that option. ``package`` is what this type needs
    beside kvtiers. ``summary`` is for the reference.
    """

    name: str
    summary: str
    fields: tuple[Field, ...] = ()
    needs_local_disk: bool = False
    shared: bool = False
    without: frozenset[str] = frozenset()
    io_threads: int = 8
    package: NeededPackage | None = None

    @property
    def common(self) -> tuple[Field, ...]:
        """The fields of ``TIER_FIELDS`` that this type accepts."""
        return tuple(field for field in TIER_FIELDS if field.name not in self.without)


TIER_TYPES: dict[str, TierType] = {}


def register_tier_type(tier_type: TierType) -> None:
    """Make a type of tier known to configurations. Raises ``ValueError`` if the name is taken."""
    if tier_type.name in TIER_TYPES:
        raise ValueError(f"tier type {tier_type.name!r} is registered already")
    TIER_TYPES[tier_type.name] = tier_type


def _shared(meaning: str) -> Field:
    return Field("shared", flag(), False, meaning)


register_tier_type(
    TierType(
        "lmdb",
        "LMDB index, with payloads in preallocated extents in a separate file; needs a local disk.",
        (
            Field(
                "direct_io",
                choice("auto", "off"),
                "auto",
                "`auto` bypasses the page cache if the file system supports that; `off` never "
                "does.",
            ),
            Field(
                "scrub",
                choice("idle", "off"),
                "idle",
                "`idle` verifies records while the tier has nothing else to do, and removes "
                "damaged ones. Not for shared tiers.",
            ),
            Field(
                "scrub_rate",
                size(),
                8 << 20,
                "Maximum bytes per second that the scrub reads, per server.",
                "`8MiB`",
            ),
            Field(
                "scrub_period_s",
                number(60, 31_536_000, " s"),
                604_800.0,
                "Time within which the scrub verifies each record once.",
            ),
            _shared(
                "Several engines of this machine share `path` and one `capacity`: set it to "
                "`true` in all of them. See the [guide](../guides/share.md#a-folder).",
            ),
        ),
        needs_local_disk=True,
    )
)
register_tier_type(
    TierType(
        "file",
        "One record per file; for file systems that LMDB cannot use.",
        (
            _shared(
                "Several engines, on one or more machines, share `path` on NFS, Lustre, CephFS "
                "or a local disk: set it to `true` in all of them. `capacity` then applies to "
                "each namespace. See the [guide](../guides/share.md#a-folder).",
            ),
        ),
    )
)
register_tier_type(
    TierType(
        "mooncake",
        "A [Mooncake](https://github.com/kvcache-ai/Mooncake) store that servers of many "
        "machines share; needs the extra `mooncake`. It manages its capacity itself. See the "
        "[guide](../guides/share.md#a-mooncake-store).",
        (
            Field("master", address(), REQUIRED, "Address of `mooncake_master`."),
            Field(
                "metadata",
                text("http://10.0.0.1:8080/metadata"),
                "",
                "URL of the metadata server, or `P2PHANDSHAKE` for none.",
                "port 8080 of the master's machine",
            ),
            Field(
                "segment",
                size(bytes_min=0),
                1 << 30,
                "Memory that this server contributes to the store, all ranks together, in "
                "addition to `cpu.capacity`. The content of this memory is lost for all servers "
                "when this server stops. 0 contributes none.",
                "`1GiB`",
            ),
            Field(
                "protocol",
                choice("tcp", "rdma"),
                "tcp",
                "Transport protocol. `rdma` has never been tested by the authors.",
            ),
            Field("device", text("mlx5_0,mlx5_1"), "", "RDMA devices to use.", "all"),
            Field(
                "host",
                text("10.0.0.7"),
                "",
                "Address by which other servers reach this machine.",
                "the address of the interface that leads to the master",
            ),
        ),
        shared=True,
        without=frozenset(
            {
                "path",
                "capacity",
                "high_watermark",
                "low_watermark",
                "reserve",
                "recovery",
                "encryption",
                "compression",
            }
        ),
        io_threads=4,
        package=NeededPackage(
            "mooncake",
            "mooncake.store",
            "mooncake-transfer-engine-non-cuda==0.3.13.post1",
            "docs/guides/share.md",
        ),
    )
)
