"""The time that a test waits for something that must happen."""

PATIENCE_S = 600.0
"""Far longer than anything takes on the slowest machine. What it bounds has failed when it is over,
so that no test waits forever; pytest's own limit (``timeout`` in pyproject.toml) is longer."""
