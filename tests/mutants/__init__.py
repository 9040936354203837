"""The permanent set of planted faults: ``./run mutants``. See ``docs/testing.md``."""
