"""``./run serve MODEL [flags]``: ``kvtiers serve`` from a checkout."""

from __future__ import annotations

import sys

from offload.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    main()
