"""Attention: which kernel runs, and whether it computes what fp32 does."""
