"""Measurements, each its own command: `python -m bench NAME`."""
