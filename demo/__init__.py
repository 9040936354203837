"""The demonstration behind `./run demo`; it runs from a checkout and is not installed."""
