"""The time that a test waits for an event that must happen."""

PATIENCE_S = 600.0
"""Far longer than anything takes on the slowest machine. When this time is over, the test fails, so
that no test waits forever; pytest's own limit (``timeout`` in pyproject.toml) is longer."""
