"""The kept set of planted faults: ``./run mutants``. See ``docs/testing.md``."""
