"""Reads the arrays of requests, and describes those of answers."""
