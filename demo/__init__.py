"""The demonstration behind ``./run demo``; runs from a checkout, no part of the installed package."""
