"""Traces and the simulator behind `kvtiers simulate`."""
