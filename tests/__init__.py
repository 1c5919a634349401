"""Tests; what they share is in ``tests.harness``."""
