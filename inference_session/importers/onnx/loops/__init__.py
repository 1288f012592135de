"""Loops over bags, which exporters write, become look-ups."""
