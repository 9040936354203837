"""Generates the tables of ``docs/reference/configuration.md``.

``tests/offload/config/test_schema.py`` compares them with the page, and rewrites it on request.
"""

from __future__ import annotations

from offload.config.fields import REQUIRED, Field, show
from offload.config.options import CPU_FIELDS, TIER_FIELDS, TOP_FIELDS
from offload.config.tier_types import TIER_TYPES


def tables() -> str:
    """The tables, generated from the fields."""
    parts = [
        "## Top level\n",
        _HEAD,
        *map(_row, TOP_FIELDS),
        "\n## `cpu`\n",
        _HEAD,
        *map(_row, CPU_FIELDS),
        "\n## `tiers[i]`\n",
        _HEAD,
        f"| `type` | {' / '.join(f'`{name}`' for name in TIER_TYPES)} | required | Kind of tier. |",
        *map(_row, TIER_FIELDS),
    ]
    for tier_type in TIER_TYPES.values():
        parts.append(f"\n### Type `{tier_type.name}`\n\n{tier_type.summary}")
        if tier_type.without:
            names = [field.name for field in TIER_FIELDS if field.name in tier_type.without]
            parts.append(
                "\nOf the options above it accepts all except "
                + ", ".join(f"`{name}`" for name in names)
                + "."
            )
        if tier_type.fields:
            parts += ["", _HEAD, *map(_row, tier_type.fields)]
    return "\n".join(parts) + "\n"


_HEAD = "| option | value | default | meaning |\n|---|---|---|---|"


def _row(field: Field) -> str:
    if field.shown:
        default = field.shown
    elif field.default is REQUIRED:
        default = "required"
    else:
        default = f"`{show(field.default)}`".replace('"', "")
    return f"| `{field.name}` | {field.kind.label} | {default} | {field.doc} |"
