"""Scaling laws in words and pictures."""
