"""Verification: a strategy against a single-process reference on the same data."""
