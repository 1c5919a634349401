"""Attention: which kernel runs, and whether it computes what fp64 does."""
