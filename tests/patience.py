"""How long a test waits for what must happen."""

PATIENCE_S = 600.0
"""Far longer than anything takes on the slowest machine. What it bounds has failed when it is over,
so that no test waits for ever; pytest's own limit (``timeout`` in pyproject.toml) is longer."""
