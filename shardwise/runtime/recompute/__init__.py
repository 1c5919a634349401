"""Activation checkpointing: selective, in segments, and under a memory budget."""
