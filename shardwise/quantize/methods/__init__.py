"""Quantization methods: one file each, all with the same call (base.py)."""
